// rk_attend: attention over blocks, in vectors, or in the tiles of AMX where the library has these and they know
// the formats.
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
  const bool in_8_bits = layer->k_format == RK_Q8H || layer->v_format == RK_Q8H;
  if (!layer->latent && !in_8_bits) return in_tiles::attend(*layer, *call, threads);
#endif
  in_vectors::attend(*layer, *call, threads);
}
