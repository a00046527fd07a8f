// Matrices of checkpoints in the order in which kernels read them.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace archerfish {

// Rows of a checkpoint, whose first one becomes the output `first` of a matrix.
struct SourceRows {
  Type type;                      // of the numbers of a plain matrix
  const void* data;               // such numbers; codes of GGUF's blocks; or its super-blocks (Q4_K to Q6_K)
  const uint16_t *scales, *mins;  // float16, of each block (Q4_0 to Q8_0)
  int64_t first, count;
};

// Bytes of a packed matrix; its memory must be zeros before it is packed.
int64_t packed_bytes(Format format, int64_t num_outputs, int64_t num_inputs);

// Bytes of a checkpoint's row: of numbers, of codes in blocks or of super-blocks.
int64_t source_row_bytes(Format format, Type type, int64_t num_inputs);

// Packs rows `begin` to `end` of these. Several threads may pack rows of one matrix.
void pack_rows(Format format, int64_t num_inputs, const SourceRows& rows, int64_t begin, int64_t end, uint8_t* out);

}  // namespace archerfish
