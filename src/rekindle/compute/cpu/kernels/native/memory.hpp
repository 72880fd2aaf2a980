// Work memory that a call takes and gives back.
#pragma once

#include <cstdint>
#include <cstdlib>

// Room for `count` values, aligned to 64 bytes; their content is not set.
template <typename T>
struct Taken {
  T* memory;

  explicit Taken(int64_t count) : memory((T*)aligned_alloc(64, (count * sizeof(T) + 64) / 64 * 64)) {
    if (memory == nullptr) abort();
  }
  Taken(const Taken&) = delete;
  ~Taken() { free(memory); }
};
