#include "rekindle.h"

extern "C" int32_t rk_interface(void) { return RK_INTERFACE; }
