#include "rekindle.h"

#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

extern "C" int32_t rk_interface(void) { return RK_INTERFACE; }

extern "C" int32_t rk_start(void) {
#if defined(__AMX_TILE__)
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl(2): it holds for the whole process
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return 1;
#endif
}
