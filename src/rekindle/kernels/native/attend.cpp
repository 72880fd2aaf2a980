// rk_attend: attention over blocks, in vectors, or in the tiles of AMX where the library has these.
#include <algorithm>
#include <cstdlib>

#include "levels.hpp"
#include "memory.hpp"

namespace in_vectors {
namespace products = levels;
#include "attention.hpp"
}  // namespace in_vectors

#if defined(__AMX_BF16__)
#include "tiled.hpp"

namespace in_tiles {
namespace products = tiled;
#include "attention.hpp"
}  // namespace in_tiles
#endif

extern "C" void rk_attend(const rk_layer* layer, const rk_attend_call* call, int32_t threads) {
#if defined(__AMX_BF16__)
  if (!layer->latent) return in_tiles::attend(*layer, *call, threads);
#endif
  in_vectors::attend(*layer, *call, threads);
}
