// Matrices of checkpoints in the order in which kernels read them.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace archerfish {

// Bytes of a packed matrix; its memory must be zeros before it is packed.
int64_t packed_bytes(Format format, int64_t num_outputs, int64_t num_inputs);

// Rows of a plain matrix, whose first one becomes the output `first`.
void pack_plain(Format format, Type type, const void* rows, int64_t num_rows, int64_t num_inputs, int64_t first, uint8_t* out);

// Rows of blocks as GGUF has them, taken apart: codes, and float16 scales and minima of each block (Q4_0 to Q8_0).
void pack_blocks(Format format, const uint8_t* codes, const uint16_t* scales, const uint16_t* mins, int64_t num_rows,
                 int64_t num_inputs, int64_t first, uint8_t* out);

// Rows of GGUF's super-blocks (Q4_K to Q6_K).
void pack_super_blocks(Format format, const uint8_t* blocks, int64_t num_rows, int64_t num_inputs, int64_t first, uint8_t* out);

}  // namespace archerfish
