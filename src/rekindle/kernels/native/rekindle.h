/* The kernels' C interface: plain pointers and numbers, no torch, no Python.
 *
 * A function returns nothing unless it says so, allocates only work memory of its own, and uses at most `threads`
 * threads. Callers guarantee shapes; nothing is checked here.
 */
#ifndef REKINDLE_H
#define REKINDLE_H

#include <stdint.h>

/* Everything else in a library is hidden: it is compiled with -fvisibility=hidden. */
#pragma GCC visibility push(default)

#ifdef __cplusplus
extern "C" {
#endif

/* The number of this interface; a library with another one is not used. `INTERFACE` in library.py is the same. */
#define RK_INTERFACE 1
int32_t rk_interface(void);

#ifdef __cplusplus
}
#endif

#pragma GCC visibility pop

#endif
