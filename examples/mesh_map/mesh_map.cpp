// Shows a folded mesh: both views, what one rank belongs to, the communicators it makes, and a picture.
#include <algorithm>
#include <charconv>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pleat/mesh.hpp>
#include <pleat/mesh/communicator_plan.hpp>
#include <pleat/mesh/svg.hpp>
#include <pleat/mesh/text.hpp>

namespace {

constexpr const char* usage =
    R"(mesh_map MESH [options]                 MESH as in pp2-dp4-cp4-ep2 or pp1-dp8-cp4-ep8-r2
mesh_map --world N [--pp N] [--cp N] [--ep N] [--replicas N] [options]     dp follows from the world

  --rank N     the rank whose groups and communicators are listed (0)
  --domain N   GPUs of one node (8)
  --svg FILE   also write a picture
  --help       this text
)";

struct usage_error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Request {
  std::string mesh;
  bool folds = false;
  pleat::FoldDegrees degrees;
  int rank = 0;
  pleat::DrawOptions draw;
  std::string svg;
  bool help = false;
};

int number(std::string_view option, std::string_view text) {
  int value = 0;
  const auto [stop, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failure == std::errc::invalid_argument || stop != text.data() + text.size()) {
    throw usage_error(std::string(option) + " needs a number, not \"" + std::string(text) + "\"");
  }
  if (failure != std::errc{}) throw usage_error(std::string(option) + " " + std::string(text) + " does not fit in int");
  return value;
}

Request read(const std::vector<std::string_view>& arguments) {
  Request request;
  const std::pair<const char*, int*> numbers[] = {{"--world", &request.degrees.world},
                                                  {"--pp", &request.degrees.pp},
                                                  {"--cp", &request.degrees.cp},
                                                  {"--ep", &request.degrees.ep},
                                                  {"--rank", &request.rank},
                                                  {"--replicas", &request.degrees.replicas},
                                                  {"--domain", &request.draw.gpus_per_domain}};
  bool has_degrees = false;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view name = arguments[i];
    const auto value = [&] {
      if (i + 1 == arguments.size()) throw usage_error(std::string(name) + " needs a value");
      return arguments[++i];
    };
    const auto* const known =
        std::find_if(std::begin(numbers), std::end(numbers), [&](const auto& option) { return option.first == name; });
    if (name == "--help") {
      request.help = true;
    } else if (name == "--svg") {
      request.svg = value();
    } else if (known != std::end(numbers)) {
      *known->second = number(name, value());
      request.folds |= name == "--world";
      has_degrees |= name != "--rank" && name != "--domain";
    } else if (name.substr(0, 1) == "-" || !request.mesh.empty()) {
      throw usage_error("\"" + std::string(name) + "\" is not understood");
    } else {
      request.mesh = name;
    }
  }
  if (!request.help && request.folds == !request.mesh.empty()) {
    throw usage_error("give either a mesh, as in pp2-dp4-cp4-ep2, or --world");
  }
  if (const int gpus = request.draw.gpus_per_domain; gpus < 1) {
    pleat::fail<pleat::mesh_error>("pleat[M00]: --domain ", gpus, " must be at least 1");
  }
  if (has_degrees && !request.folds) throw usage_error("--pp, --cp, --ep and --replicas go with --world");
  return request;
}

void print_groups(const pleat::RuntimeMesh& mesh, int rank, const pleat::Coordinate& at) {
  constexpr std::size_t longest = 72;
  std::cout << pleat::message_of("\nrank ", rank, ": ", at, '\n').c_str();
  std::cout << "communicators it makes, one split each, in this order on every rank\n";
  for (const pleat::PlannedCommunicator& entry : plan_communicators(
           mesh, rank, {pleat::Lane::main, pleat::Lane::gather, pleat::Lane::reduce, pleat::Lane::overlap})) {
    std::string uses;
    for (int i = 0; i < pleat::group_use_count; ++i) {
      const auto use = static_cast<pleat::GroupUse>(i);
      if (entry.serves(use)) uses += (uses.empty() ? "" : ", ") + std::string(name_of(use));
    }
    std::string ranks = pleat::message_of(entry.group).c_str();
    if (ranks.size() > longest) ranks = ranks.substr(0, ranks.rfind(',', longest)) + ", ..}";
    std::cout << "  " << std::left << std::setw(8) << name_of(entry.lane) << " color " << std::setw(5) << entry.color
              << " key " << std::setw(5) << entry.key << std::right << std::setw(5) << entry.group.size() << " ranks  "
              << std::left << std::setw(26) << uses << ' ' << ranks << '\n';
  }
}

void run(const Request& request) {
  const pleat::RuntimeMesh mesh =
      request.folds ? pleat::RuntimeMesh::fold(request.degrees) : pleat::parse_mesh(request.mesh);
  const pleat::Coordinate at = mesh.coordinate(request.rank);  // refuses a rank before anything is printed
  std::cout << draw_text(mesh, request.draw);
  print_groups(mesh, request.rank, at);
  if (request.svg.empty()) return;
  std::ofstream file(request.svg);
  file << draw_svg(mesh, request.draw);
  if (!file.flush()) throw std::runtime_error("cannot write " + request.svg);
  std::cout << "\nwrote " << request.svg << '\n';
}

}  // namespace

int main(int count, char** arguments) {
  try {
    const Request request = read({arguments + 1, arguments + count});
    if (request.help) {
      std::cout << usage;
    } else {
      run(request);
    }
    if (!std::cout.flush()) throw std::runtime_error("cannot write to the standard output: is its disk full?");
    return 0;
  } catch (const usage_error& error) {
    std::cerr << "mesh_map: " << error.what() << "\n\n" << usage;
    return 2;
  } catch (const pleat::mesh_error& error) {
    std::cerr << "mesh_map: " << error.what() << '\n';
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "mesh_map: " << error.what() << '\n';
    return 1;
  }
}
