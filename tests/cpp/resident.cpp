#include "cuda/resident.h"

#include "cuda/prepare.h"
#include "grids.h"

namespace spectrain {
namespace {

// Moves the numbers of a setting into memory, and leaves their placeholders behind.
void take(double& field, std::vector<double>& numbers) {
  numbers.push_back(field);
  field = placeholder(static_cast<uint16_t>(numbers.size() - 1));
}

Setting without_numbers(Setting s, std::vector<double>& numbers) {
  for (double* field : {&s.sign, &s.weight_decay, &s.decay, &s.gain, &s.decay2, &s.eps}) {
    take(*field, numbers);
  }
  const auto take_term = [&](Term& t) {
    for (double* field : {&t.keep, &t.momentum, &t.gradient, &t.root}) take(*field, numbers);
  };
  take_term(s.step);
  for (int i = 0; i < used_terms(s); ++i) take_term(s.terms[i]);
  return s;
}

}  // namespace

Resident::Resident(const TableView& table, Settings settings, size_t argument_bytes,
                   DType arithmetic)
    : view_(table) {
  const ResidentLayout layout(table, settings.size, argument_bytes);
  memory_.reset(new Piece[layout.bytes / sizeof(Piece)]);
  char* at = memory_[0].bytes;
  memcpy(at, table.rows, layout.rows_bytes);
  memcpy(at + layout.rows_bytes, table.pointers, layout.pointers_bytes);
  for (int i = 0; i < settings.size; ++i) {
    std::vector<double> numbers;
    Setting setting = without_numbers(settings.data[i], numbers);
    Program program;
    for (const double& number : numbers) program.inputs.push_back({&number, InputType::float64});
    std::vector<double> registers(program.view().n_registers());
    evaluate(program.view(), registers.data());
    fill_in(setting, registers.data());
    place_arguments(operation, arithmetic, setting, at + layout.arguments_at + i * argument_bytes);
  }
  view_.rows = reinterpret_cast<const Row*>(at);
  view_.pointers = reinterpret_cast<void* const*>(at + layout.rows_bytes);
  arguments_ = at + layout.arguments_at;
}

}  // namespace spectrain
