// Estimates as text: a table of meshes, one mesh in detail, and JSON.
#pragma once

#include <cstdio>

#include <pleat/estimate/advice.hpp>

namespace pleat::inline v0::estimate {

/// An estimate and what would help; advice may be left empty.
struct Row {
  Estimate made;
  std::vector<Advice> advice;
};

namespace detail {
inline std::string fixed(double value, int digits, int width = 0) {
  char text[64];
  std::snprintf(text, sizeof text, "%*.*f", width, digits, value);
  return text;
}
inline double gib(double bytes) {
  return bytes / (1 << 30);
}
inline std::string left(std::string text, std::size_t width) {
  return v0::detail::filled(std::move(text), width);
}
/// Three digits that matter, whatever the size.
inline std::string seconds(double value, int width = 0) {
  return fixed(value, value >= 100 ? 0 : value >= 10 ? 1 : value >= 1 ? 2 : 4, width);
}
inline double tokens_per_gpu_second(const Job& job, const Estimate& e) {
  return static_cast<double>(job.batch) * static_cast<double>(job.sequence) / e.time.seconds.expected / job.world;
}
}  // namespace detail

/// The job in one line.
inline std::string job_text(const Job& job) {
  const auto count = static_cast<double>(parameter_count(job.model));
  return v0::detail::text(
      job.model.name.c_str(), ": ", detail::fixed(count / 1e9, 2).c_str(), " billion parameters; ", job.world,
      " ranks of ", detail::fixed(detail::gib(static_cast<double>(job.gpu_bytes)), 0).c_str(), " GiB, ", job.domain,
      " to a domain; ", job.batch, " sequences of ", job.sequence, " tokens a step, ", job.micro_batch, " at a time; ",
      name_of(job.schedule), ", ", job.optimizer == fsdp::Optimizer::muon ? "muon" : "adamw", ", prefetch ",
      job.prefetch, ", gradients ", name_of(job.gradient), ", capacity ",
      job.capacity == 0 ? "for every routing" : detail::fixed(job.capacity, 2).c_str());
}

/// One line per mesh.
inline std::string draw_text(const Job& job, std::span<const Row> rows) {
  std::size_t mesh_width = 4;
  for (const Row& row : rows) mesh_width = std::max(mesh_width, to_string(row.made.mesh).size());
  std::string text =
      job_text(job) + "\n\n" + detail::left("mesh", mesh_width) +
      "  verdict          GiB   shards  units   acts   rest   rank    step s  tok/s/GPU  at least  by        "
      "NVLink GB  network GB  what helps\n";
  for (const Row& row : rows) {
    const Estimate& e = row.made;
    const Memory& m = e.memory;
    const double shards = m[Part::parameters] + m[Part::gradients] + m[Part::optimizer];
    const double units = m[Part::slots] + m[Part::gradient_units], acts = m[Part::activations];
    const auto column = [](double bytes) { return detail::fixed(detail::gib(bytes), 1, 7); };
    const Bytes sent = e.traffic.total();
    text += detail::left(to_string(e.mesh), mesh_width) + "  " + detail::left(name_of(e.verdict), 12) +
            detail::fixed(detail::gib(m.total()), 2, 8) + "  " + column(shards) + column(units) + column(acts) +
            column(m.total() - shards - units - acts) + v0::detail::padded(std::to_string(e.worst_rank()), 7) +
            detail::seconds(e.time.seconds.expected, 10) + detail::fixed(detail::tokens_per_gpu_second(job, e), 0, 11) +
            "  " + detail::left(name_of(e.time.limit), 8) + detail::fixed(sent.nvlink / 1e9, 1, 11) +
            detail::fixed(sent.network / 1e9, 1, 12);
    if (!row.advice.empty()) {
      const Advice& best = row.advice.front();
      text += "  " + best.change + ": " + detail::fixed(detail::gib(best.total_bytes), 2);
    }
    text += '\n';
  }
  return text;
}

/// One mesh: every part of its memory, every use of its links, and all that helps.
inline std::string detail_text(const Job& job, const Row& row) {
  const Estimate& e = row.made;
  const auto most = static_cast<double>(job.gpu_bytes);
  std::string text = job_text(job) + "\n\n" + to_string(e.mesh) + ": " + name_of(e.verdict) + ", " +
                     detail::fixed(detail::gib(e.memory.total()), 2) + " of " + detail::fixed(detail::gib(most), 0) +
                     " GiB on ranks " + std::to_string(e.worst_rank()) + " to " +
                     std::to_string(e.worst_rank() + e.mesh.stage_size - 1) + " (pipeline rank " +
                     std::to_string(e.worst_stage) + ")\n";
  for (int i = 0; i < part_count; ++i) {
    const double bytes = e.memory.bytes[static_cast<std::size_t>(i)];
    const auto width = static_cast<std::size_t>(std::lround(bytes / most * 60));
    text += "  " + detail::left(name_of(static_cast<Part>(i)), 15) + detail::fixed(detail::gib(bytes), 3, 9) +
            " GiB  " + std::string(std::min<std::size_t>(width, 120), '#') + '\n';
  }
  text += "\nstep: " + detail::seconds(e.time.seconds.expected) + " s expected, at least " +
          detail::seconds(e.time.seconds.bound) + " s, bound by " + name_of(e.time.limit) + "; " +
          std::to_string(e.micro_batches) + " micro-batches, " + detail::fixed(100 * e.time.bubble_share, 1) +
          " % bubble; " + detail::fixed(detail::tokens_per_gpu_second(job, e), 0) + " tokens/s per GPU\n";
  text += "  sent per rank        NVLink GB   network GB\n";
  for (int i = 0; i < use_count; ++i) {
    const Bytes& bytes = e.traffic.bytes[static_cast<std::size_t>(i)];
    text += "  " + detail::left(name_of(static_cast<Use>(i)), 15) + detail::fixed(bytes.nvlink / 1e9, 2, 15) +
            detail::fixed(bytes.network / 1e9, 2, 13) + '\n';
  }
  if (row.advice.empty()) return text + "\nno single change takes memory off\n";
  text += "\none change            GiB              step s\n";
  for (const Advice& a : row.advice) {
    text += "  " + detail::left(a.change, 15) + detail::fixed(detail::gib(a.total_bytes), 2, 8) + "  " +
            detail::left(name_of(a.verdict), 13) + detail::seconds(a.step_seconds, 8) + '\n';
  }
  return text;
}

/// All of it, numbers in bytes, seconds and FLOP/s.
inline std::string to_json(const Job& job, std::span<const Row> rows) {
  const auto number = [](double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.10g", value);
    return std::string(text);
  };
  const auto member = [&](const char* name, double value) { return '"' + std::string(name) + "\": " + number(value); };
  const auto quoted = [](const char* name, const std::string& value) {
    return '"' + std::string(name) + "\": \"" + value + '"';
  };
  std::string json =
      "{\n\"job\": {" + quoted("model", job.model.name) + ", " +
      member("parameters", static_cast<double>(parameter_count(job.model))) + ", " + member("world", job.world) + ", " +
      member("gpu_bytes", static_cast<double>(job.gpu_bytes)) + ", " + member("domain", job.domain) + ", " +
      member("sequence", static_cast<double>(job.sequence)) + ", " + member("micro_batch", job.micro_batch) + ", " +
      member("batch", static_cast<double>(job.batch)) + ", " + quoted("schedule", name_of(job.schedule)) + ", " +
      member("prefetch", job.prefetch) + ", " + member("capacity", job.capacity) + "},\n\"ceilings\": [";
  const char* separator = "\n";
  for (const Ceiling& c : ceilings) {
    json += separator + ('{' + quoted("name", c.name)) + ", " + member("value", c.value) + ", " +
            quoted("unit", c.unit) + ", " + quoted("source", c.source) + '}';
    separator = ",\n";
  }
  json += "],\n\"meshes\": [";
  separator = "\n";
  for (const Row& row : rows) {
    const Estimate& e = row.made;
    json += separator + ('{' + quoted("mesh", to_string(e.mesh))) + ", " + member("pp", e.mesh.pp) + ", " +
            member("dp", e.mesh.dp) + ", " + member("cp", e.mesh.cp) + ", " + member("ep", e.mesh.ep) + ", " +
            member("replicas", e.mesh.replicas) + ", " + quoted("verdict", name_of(e.verdict)) + ", " +
            member("worst_rank", e.worst_rank()) + ", " + member("total_bytes", e.memory.total()) + ", \"memory\": {";
    for (int i = 0; i < part_count; ++i) {
      json += (i == 0 ? "" : ", ") + member(name_of(static_cast<Part>(i)), e.memory.bytes[static_cast<std::size_t>(i)]);
    }
    json += "}, \"sent\": {";
    for (int i = 0; i < use_count; ++i) {
      const Bytes& bytes = e.traffic.bytes[static_cast<std::size_t>(i)];
      json += std::string(i == 0 ? "" : ", ") + '"' + name_of(static_cast<Use>(i)) + "\": {" +
              member("nvlink", bytes.nvlink) + ", " + member("network", bytes.network) + '}';
    }
    json += "}, " + member("micro_batches", static_cast<double>(e.micro_batches)) + ", " +
            member("expected_seconds", e.time.seconds.expected) + ", " + member("bound_seconds", e.time.seconds.bound) +
            ", " + quoted("bound_by", name_of(e.time.limit)) + ", " + member("bubble_share", e.time.bubble_share) +
            ", \"helps\": [";
    for (std::size_t i = 0; i < row.advice.size(); ++i) {
      const Advice& a = row.advice[i];
      json += std::string(i == 0 ? "" : ", ") + '{' + quoted("change", a.change) + ", " +
              member("total_bytes", a.total_bytes) + ", " + quoted("verdict", name_of(a.verdict)) + ", " +
              member("expected_seconds", a.step_seconds) + '}';
    }
    json += "]}";
    separator = ",\n";
  }
  return json + "]\n}\n";
}

}  // namespace pleat::inline v0::estimate
