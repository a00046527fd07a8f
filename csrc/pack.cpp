#define LEVEL common
#include "pack.h"

#include "layout.h"
#include "vec.h"

namespace archerfish {
namespace {

using common::read_as;
using common::write_as;

constexpr int64_t kSuperInputs = kBlock * kSuper;

void put_half(uint8_t* at, int lane, uint16_t bits) { memcpy(at + 2 * lane, &bits, 2); }

// The 32 codes of one output in a block. at: behind the block's scales.
void put_codes(Format format, const uint8_t* codes, int lane, uint8_t* at) {
  const int bits = bits_of(format);
  for (int k = 0; k < kBlock; k++) {
    const int word = k / 4, byte = 4 * lane + k % 4;
    at[word % 4 * kWordBytes + byte] |= uint8_t((codes[k] & 15) << (word < 4 ? 0 : 4));
    if (bits == 5) at[4 * kWordBytes + byte] |= uint8_t((codes[k] >> 4) << word);
    if (bits == 6) at[(4 + word / 4) * kWordBytes + byte] |= uint8_t((codes[k] >> 4) << (2 * (word % 4)));
  }
}

void read_codes(const uint8_t* from, uint8_t* codes) {  // of Q5_0 and Q5_1
  uint32_t high;
  memcpy(&high, from, 4), from += 4;
  for (int i = 0; i < 16; i++) {
    codes[i] = uint8_t((from[i] & 15) | (high >> i & 1) << 4);
    codes[i + 16] = uint8_t(from[i] >> 4 | (high >> (i + 16) & 1) << 4);
  }
}

struct SuperBlock {  // of one output
  uint16_t scale, min;
  uint8_t scales[16], mins[8], codes[kSuperInputs];
};

void read_super(Format format, const uint8_t* from, SuperBlock& to) {
  if (format == Format::kQ6_K) {
    const uint8_t *low = from, *high = from + 128;
    for (int half = 0; half < 2; half++, low += 64, high += 32)
      for (int i = 0; i < 32; i++)
        for (int quarter = 0; quarter < 4; quarter++) {
          int nibble = quarter < 2 ? low[i + 32 * quarter] & 15 : low[i + 32 * (quarter - 2)] >> 4;
          to.codes[half * 128 + quarter * 32 + i] = uint8_t(nibble | (high[i] >> (2 * quarter) & 3) << 4);
        }
    memcpy(to.scales, from + 192, 16);
    memcpy(&to.scale, from + 208, 2);
    return;
  }
  memcpy(&to.scale, from, 2), memcpy(&to.min, from + 2, 2);
  const uint8_t* packed = from + 4;
  for (int j = 0; j < kSuper; j++) {
    to.scales[j] = j < 4 ? packed[j] & 63 : uint8_t((packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4);
    to.mins[j] = j < 4 ? packed[j + 4] & 63 : uint8_t((packed[j + 4] >> 4) | (packed[j] >> 6) << 4);
  }
  const bool has_high = format == Format::kQ5_K;
  const uint8_t *high = from + 16, *low = from + 16 + (has_high ? 32 : 0);
  for (int j = 0; j < kSuper; j++)
    for (int i = 0; i < 32; i++) {
      int nibble = j % 2 ? low[j / 2 * 32 + i] >> 4 : low[j / 2 * 32 + i] & 15;
      to.codes[j * 32 + i] = uint8_t(nibble | (has_high ? (high[i] >> j & 1) << 4 : 0));
    }
}

int64_t super_bytes(Format format) { return format == Format::kQ4_K ? 144 : format == Format::kQ5_K ? 176 : 210; }

// The weights of one output as signed bytes, of which the largest is 127.
void pack_bytes(Type type, const void* rows, int64_t place, int64_t num_inputs, int64_t lane, uint8_t* group) {
  float highest = 0;
  for (int64_t k = 0; k < num_inputs; k++) {
    const float size = std::fabs(read_as(type, rows, place + k));
    highest = size > highest || std::isnan(size) ? size : highest;
  }
  const float scale = highest > 0 ? highest / 127 : highest;
  int32_t sum = 0;
  int8_t* codes = reinterpret_cast<int8_t*>(group + kByteHeader) + 4 * lane;
  for (int64_t k = 0; k < num_inputs && scale > 0; k++) {
    const float code = std::nearbyint(read_as(type, rows, place + k) / scale);
    sum += codes[k / 4 * kWordBytes + k % 4] = int8_t(code > -127 ? code < 127 ? code : 127 : -127);
  }
  reinterpret_cast<float*>(group)[lane] = scale;
  reinterpret_cast<int32_t*>(group)[kGroup + lane] = sum;
}

void pack_plain(Format format, int64_t num_inputs, const SourceRows& rows, int64_t begin, int64_t end, uint8_t* out) {
  for (int64_t row = begin; row < end; row++) {
    const int64_t output = rows.first + row, lane = output % kGroup;
    uint8_t* group = out + output / kGroup * group_bytes(format, num_inputs);
    if (format == Format::kInt8) {
      pack_bytes(rows.type, rows.data, row * num_inputs, num_inputs, lane, group);
      continue;
    }
    for (int64_t k = 0; k < num_inputs; k++) {
      int64_t place = format == Format::kBfloat ? (k / 2 * kGroup + lane) * 2 + k % 2 : k * kGroup + lane;
      write_as(Type(int(format)), group, place, read_as(rows.type, rows.data, row * num_inputs + k));
    }
  }
}

// Of a row and a block: codes, scale and minimum.
ALWAYS_INLINE void pack_block(Format format, const SourceRows& rows, int64_t place, int lane, uint8_t* block) {
  const uint8_t* codes = static_cast<const uint8_t*>(rows.data) + place * bits_of(format) * kBlock / 8;
  put_half(block, lane, rows.scales[place]);
  if (has_min(format)) put_half(block + 2 * kGroup, lane, rows.mins[place]);
  uint8_t* at = block + scale_bytes(format);
  if (bits_of(format) != 5) {  // GGUF has the same order within a block
    for (int word = 0; word < bits_of(format); word++) memcpy(at + word * kWordBytes + 4 * lane, codes + 4 * word, 4);
    return;
  }
  uint8_t some[kBlock];
  read_codes(codes, some);
  put_codes(format, some, lane, at);
}

template <Format format>
void pack_blocks_as(int64_t num_inputs, const SourceRows rows, int64_t begin, int64_t end, uint8_t* out) {
  const int64_t num_blocks = num_inputs / kBlock;
  for (int64_t row = begin; row < end;) {
    const int lane = int((rows.first + row) % kGroup),
              count = int(end - row < kGroup - lane ? end - row : kGroup - lane);
    uint8_t* block = out + (rows.first + row) / kGroup * group_bytes(format, num_inputs);
    for (int64_t b = 0; b < num_blocks; b++, block += block_bytes(format))
      for (int i = 0; i < count; i++) pack_block(format, rows, (row + i) * num_blocks + b, lane + i, block);
    row += count;
  }
}

void pack_blocks(Format format, int64_t num_inputs, const SourceRows& rows, int64_t begin, int64_t end, uint8_t* out) {
  switch (format) {
    case Format::kQ4_0:
      return pack_blocks_as<Format::kQ4_0>(num_inputs, rows, begin, end, out);
    case Format::kQ4_1:
      return pack_blocks_as<Format::kQ4_1>(num_inputs, rows, begin, end, out);
    case Format::kQ5_0:
      return pack_blocks_as<Format::kQ5_0>(num_inputs, rows, begin, end, out);
    case Format::kQ5_1:
      return pack_blocks_as<Format::kQ5_1>(num_inputs, rows, begin, end, out);
    case Format::kMxfp4:
      return pack_blocks_as<Format::kMxfp4>(num_inputs, rows, begin, end, out);
    default:
      return pack_blocks_as<Format::kQ8_0>(num_inputs, rows, begin, end, out);
  }
}

void pack_super_blocks(Format format, int64_t num_inputs, const SourceRows& rows, int64_t begin, int64_t end,
                       uint8_t* out) {
  const int64_t num_supers = num_inputs / kSuperInputs, scales_of_block = num_scales(format);
  SuperBlock found = {};
  for (int64_t row = begin; row < end; row++) {
    const int lane = int((rows.first + row) % kGroup);
    uint8_t* at = out + (rows.first + row) / kGroup * group_bytes(format, num_inputs);
    for (int64_t s = 0; s < num_supers; s++) {
      read_super(format, static_cast<const uint8_t*>(rows.data) + (row * num_supers + s) * super_bytes(format), found);
      put_half(at, lane, found.scale);
      if (has_min(format)) put_half(at + 2 * kGroup, lane, found.min);
      at += header_bytes(format);
      for (int b = 0; b < kSuper; b++, at += block_bytes(format)) {
        for (int64_t i = 0; i < scales_of_block; i++) at[i * kGroup + lane] = found.scales[b * scales_of_block + i];
        if (has_min(format)) at[kGroup + lane] = found.mins[b];
        put_codes(format, found.codes + b * kBlock, lane, at + scale_bytes(format));
      }
    }
  }
}

}  // namespace

int64_t packed_bytes(Format format, int64_t num_outputs, int64_t num_inputs) {
  return (num_outputs + kGroup - 1) / kGroup * group_bytes(format, num_inputs);
}

int64_t source_row_bytes(Format format, Type type, int64_t num_inputs) {
  if (is_super(format)) return num_inputs / kSuperInputs * super_bytes(format);
  if (is_plain(format) || format == Format::kInt8) return num_inputs * (type == Type::kFloat ? 4 : 2);
  return num_inputs / kBlock * (bits_of(format) * kBlock / 8);
}

void pack_rows(Format format, int64_t num_inputs, const SourceRows& rows, int64_t begin, int64_t end, uint8_t* out) {
  (is_plain(format) || format == Format::kInt8 ? pack_plain
   : is_super(format)                          ? pack_super_blocks
                                               : pack_blocks)(format, num_inputs, rows, begin, end, out);
}

}  // namespace archerfish
