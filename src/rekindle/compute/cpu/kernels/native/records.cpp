// Records of blocks out of files, verified: rk_read_records.
//
// The checksum is zlib's CRC-32, folded by carry-less multiplication: V. Gopal et al., "Fast CRC Computation for Generic
// Polynomials Using PCLMULQDQ Instruction", Intel 2009, with the constants of its appendix.
#include <cerrno>
#include <cstring>
#include <immintrin.h>
#include <unistd.h>

#include "memory.hpp"
#include "rekindle.h"

namespace {

constexpr uint32_t POLYNOMIAL = 0xedb88320u;  // of CRC-32, its lowest bit first
constexpr int64_t PIECE = 1 << 17;            // read and then summed while it is in the second cache

struct Table {
  uint32_t of_byte[256];

  constexpr Table() : of_byte() {
    for (uint32_t byte = 0; byte < 256; byte++) {
      uint32_t rest = byte;
      for (int bit = 0; bit < 8; bit++) rest = rest & 1 ? POLYNOMIAL ^ (rest >> 1) : rest >> 1;
      of_byte[byte] = rest;
    }
  }
};
constexpr Table TABLE;

uint32_t sum_bytes(uint32_t crc, const uint8_t* from, int64_t size) {
  for (; size > 0; size--) crc = TABLE.of_byte[(crc ^ *from++) & 255] ^ (crc >> 8);
  return crc;
}

inline __m128i load(const uint8_t* from) { return _mm_loadu_si128((const __m128i*)from); }

// `x` moved on by as many bits as the factors say, plus what is there.
inline __m128i fold(__m128i x, __m128i factors, __m128i there) {
  const __m128i low = _mm_clmulepi64_si128(x, factors, 0x00), high = _mm_clmulepi64_si128(x, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), there);
}

// The checksum of what came before and of these bytes; it begins with all bits set, and ends with all of them turned.
uint32_t sum(uint32_t crc, const uint8_t* from, int64_t size) {
  if (size < 64) return sum_bytes(crc, from, size);
  const __m128i by_512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by_128 = _mm_set_epi64x(0xccaa009e, 0x1751997d0);
  __m128i part[4];
  for (int i = 0; i < 4; i++) part[i] = load(from + 16 * i);
  part[0] = _mm_xor_si128(part[0], _mm_cvtsi32_si128((int)crc));
  for (from += 64, size -= 64; size >= 64; from += 64, size -= 64) {
    for (int i = 0; i < 4; i++) part[i] = fold(part[i], by_512, load(from + 16 * i));
  }
  __m128i all = part[0];
  for (int i = 1; i < 4; i++) all = fold(all, by_128, part[i]);
  for (; size >= 16; from += 16, size -= 16) all = fold(all, by_128, load(from));
  uint8_t folded[16];
  memcpy(folded, &all, 16);
  return sum_bytes(sum_bytes(0, folded, 16), from, size);
}

// Whether all of these bytes are there.
bool read(int file, int64_t offset, uint8_t* to, int64_t size) {
  while (size > 0) {
    const ssize_t count = pread(file, to, size, offset);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    to += count, offset += count, size -= count;
  }
  return true;
}

bool read_record(const rk_record& record, uint8_t* work) {
  int64_t offset = record.offset;
  if (!read(record.file, offset, work, record.header_bytes)) return false;
  if (memcmp(work, record.header, record.header_bytes) != 0) return false;
  offset += record.header_bytes;
  uint32_t crc = ~0u;
  for (int64_t at = 0; at < record.payload_bytes; at += PIECE) {
    const int64_t left = record.payload_bytes - at, size = left < PIECE ? left : PIECE;
    if (!read(record.file, offset + at, record.payload + at, size)) return false;
    crc = sum(crc, record.payload + at, size);
  }
  if (!read(record.file, offset + record.payload_bytes, work, record.padding_bytes)) return false;
  return ~sum(crc, work, record.padding_bytes) == record.crc;
}

}  // namespace

extern "C" int64_t rk_read_records(const rk_record* records, int64_t count) {
  int64_t most = 0;
  for (int64_t i = 0; i < count; i++) {
    const int64_t work = records[i].header_bytes > records[i].padding_bytes ? records[i].header_bytes
                                                                            : records[i].padding_bytes;
    most = most > work ? most : work;
  }
  Taken<uint8_t> work(most);
  for (int64_t i = 0; i < count; i++) {
    if (!read_record(records[i], work.memory)) return i;
  }
  return count;
}
