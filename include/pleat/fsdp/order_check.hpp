// The transport of a plan that says check_order: ranks ask each other whether all gather or sum the same unit now.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <pleat/fsdp/transport.hpp>

namespace pleat::inline v0::fsdp {

/// Compares the calls of the ranks before each is made, and waits for the ranks every time.
template <executor Executor, communicator Comm>
class CheckedTransport final : public UnitTransport<Executor> {
  using base = UnitTransport<Executor>;

 public:
  using stream_type = typename base::stream_type;

  /// `words` [ranks of the group], device memory, borrowed.
  CheckedTransport(const Plan& plan, std::unique_ptr<base> inner, Executor executor, const GroupComm<Comm>& group,
                   std::int64_t* words)
      : base(plan, inner->buffers(), group.size()),
        inner_(std::move(inner)),
        executor_(executor),
        group_(group),
        words_(words),
        calls_(static_cast<std::size_t>(group.size())) {}

  /// Errors of it and of `ready`, on every rank alike: comm_error F20 when ranks are about to make different calls.
  void gather(int slot, int unit, const void* shard, stream_type s, stream_type own) override {
    compare(false, unit, s);
    inner_->gather(slot, unit, shard, s, own);
  }
  void await_gather(int slot, int unit, stream_type s) override { inner_->await_gather(slot, unit, s); }
  void ready(int gradient_unit, int unit, stream_type s) override {
    compare(true, unit, s);
    inner_->ready(gradient_unit, unit, s);
  }
  std::span<const void* const> terms(int gradient_unit, int unit, stream_type s) override {
    return inner_->terms(gradient_unit, unit, s);
  }
  void release(int gradient_unit, stream_type s) override { inner_->release(gradient_unit, s); }
  void await_released(int gradient_unit, stream_type s) override { inner_->await_released(gradient_unit, s); }

 private:
  void compare(bool is_sum, int unit, stream_type s) {
    const auto rank = static_cast<std::size_t>(group_.rank());
    calls_[rank] = 2 * std::int64_t{unit} + is_sum;
    executor_.copy(words_ + rank, &calls_[rank], sizeof(std::int64_t), s);
    group_.all_gather(words_ + rank, words_, 1, DType::i64, s);
    group_.wait(s);
    executor_.copy(calls_.data(), words_, calls_.size() * sizeof(std::int64_t), s);
    group_.wait(s);
    for (std::size_t r = 1; r < calls_.size(); ++r) {
      if (calls_[r] == calls_[0]) continue;
      fail<comm_error>("pleat[F20]: rank ", group_.ranks()[static_cast<int>(r)], call(r), ", rank ", group_.ranks()[0],
                       call(0), "; use units in the same order on every rank of ", group_.ranks());
    }
  }
  Message call(std::size_t rank) const {
    const char* const unit = this->plan_->names[static_cast<std::size_t>(calls_[rank] / 2)].c_str();
    return message_of(calls_[rank] % 2 != 0 ? " sums unit " : " gathers unit ", unit);
  }

  std::unique_ptr<base> inner_;
  Executor executor_;
  GroupComm<Comm> group_;
  std::int64_t* words_;
  std::vector<std::int64_t> calls_;  // [rank]: unit and kind of call
};

}  // namespace pleat::inline v0::fsdp
