// Reading the text.
#include "data.hpp"

#include <filesystem>
#include <fstream>
#include <iterator>

namespace train_moe {

Text::Text(const std::string& file, int sequence, int batch) : sequence_(sequence) {
  std::error_code unknown;
  if (std::filesystem::is_directory(file, unknown)) {
    throw usage_error("--text " + file + " is a directory; name a file");
  }
  std::ifstream in(file, std::ios::binary);
  if (!in) throw usage_error("--text " + file + " cannot be read; name a file");
  bytes_.assign(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  const auto bytes = static_cast<std::int64_t>(bytes_.size());
  sequences_ = bytes == 0 ? 0 : (bytes - 1) / sequence;
  if (sequences_ < batch) {
    const std::int64_t needed = static_cast<std::int64_t>(batch) * sequence + 1;
    throw usage_error("--text " + file + " holds " + std::to_string(bytes) + " bytes, " + std::to_string(sequences_) +
                      " whole sequences of " + std::to_string(sequence) + "; a step reads " + std::to_string(batch) +
                      ": give a text of at least " + std::to_string(needed) + " bytes, or fewer or shorter sequences");
  }
}

}  // namespace train_moe
