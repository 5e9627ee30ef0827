// All kernels of the CPU in one library: compiled once per machine by native.py.
#include <tvm/ffi/function.h>

#include "../attend_home/attend_home.h"
#include "../attend_pieces/attend_pieces.h"
#include "../attend_slots/attend_slots.h"
#include "../gate_rows/gate_rows.h"
#include "../gather_chunks/gather_chunks.h"
#include "../group_keys/group_keys.h"
#include "../norm_rows/norm_rows.h"
#include "../probe_books/probe_books.h"
#include "../project_rows/project_rows.h"
#include "../rotate_heads/rotate_heads.h"
#include "../select_chunks/select_chunks.h"
#include "../store_tokens/store_tokens.h"

namespace kvdrive {
inline int64_t vector_bytes() { return KVDRIVE_VECTOR_BYTES; }
}  // namespace kvdrive

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_home, kvdrive::attend_home);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_pieces, kvdrive::attend_pieces);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_slots, kvdrive::attend_slots);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gate_rows, kvdrive::gate_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_chunks, kvdrive::gather_chunks);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(group_keys, kvdrive::group_keys);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(norm_rows, kvdrive::norm_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(probe_books, kvdrive::probe_books);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(project_rows, kvdrive::project_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rotate_heads, kvdrive::rotate_heads);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(select_chunks, kvdrive::select_chunks);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(store_tokens, kvdrive::store_tokens);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(vector_bytes, kvdrive::vector_bytes);
