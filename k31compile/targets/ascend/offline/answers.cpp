// The few entry points of CANN that must answer for torchair to convert a graph; every other symbol returns 0.
// Definitions of GE operators are read from definitions.txt beside this library.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace ge {

class AscendString {
 public:
  AscendString(const char *text);
  const char *GetString() const;
  bool operator<(const AscendString &other) const;
  bool operator==(const AscendString &other) const;

 private:
  std::shared_ptr<std::string> text_;
};

AscendString::AscendString(const char *text) : text_(std::make_shared<std::string>(text ? text : "")) {}
const char *AscendString::GetString() const { return text_ ? text_->c_str() : ""; }
bool AscendString::operator<(const AscendString &other) const { return std::strcmp(GetString(), other.GetString()) < 0; }
bool AscendString::operator==(const AscendString &other) const { return !std::strcmp(GetString(), other.GetString()); }

class TensorDesc {
 public:
  TensorDesc();

 private:
  std::shared_ptr<void> impl_;
};
TensorDesc::TensorDesc() {}

class Operator {
 public:
  virtual ~Operator();
  unsigned UpdateInputDesc(const char *name, const TensorDesc &);
  unsigned GetAllIrAttrNamesAndTypes(std::map<AscendString, AscendString> &attributes) const;

 private:
  std::shared_ptr<void> impl_;
};
Operator::~Operator() {}

class OperatorFactory {
 public:
  static bool IsExistOp(const char *type);
  static Operator CreateOperator(const char *name, const char *type);
};

}  // namespace ge

using Fields = std::vector<std::pair<ge::AscendString, ge::AscendString>>;

namespace {

struct Definition {
  Fields inputs, outputs, attributes;
};

std::map<std::string, Definition> read_definitions() {
  std::map<std::string, Definition> found;
  Dl_info place;
  dladdr(reinterpret_cast<void *>(&read_definitions), &place);
  const std::string library(place.dli_fname);
  std::ifstream file(library.substr(0, library.rfind('/')) + "/definitions.txt");
  for (std::string line; std::getline(file, line);) {
    std::stringstream parts(line);
    std::string name, part;
    std::getline(parts, name, '|');
    Definition &one = found[name];
    while (std::getline(parts, part, '|')) {
      const size_t first = part.find(':'), second = part.find(':', first + 1);
      const std::string kind = part.substr(0, first);
      Fields &fields = kind == "in" ? one.inputs : kind == "out" ? one.outputs : one.attributes;
      fields.emplace_back(ge::AscendString(part.substr(first + 1, second - first - 1).c_str()),
                          ge::AscendString(part.substr(second + 1).c_str()));
    }
  }
  return found;
}

const std::map<std::string, Definition> &definitions() {
  static const std::map<std::string, Definition> known = read_definitions();
  return known;
}

const Definition *definition_of(const std::string &type) {
  const auto found = definitions().find(type);
  return found == definitions().end() ? nullptr : &found->second;
}

// An Operator says nothing of its type, and torchair asks each one right after it was made.
thread_local std::string last_created;

}  // namespace

bool ge::OperatorFactory::IsExistOp(const char *) { return true; }

ge::Operator ge::OperatorFactory::CreateOperator(const char *, const char *type) {
  last_created = type;
  return ge::Operator();
}

unsigned ge::Operator::GetAllIrAttrNamesAndTypes(std::map<AscendString, AscendString> &attributes) const {
  if (const Definition *known = definition_of(last_created))
    for (const auto &one : known->attributes) attributes.insert(one);
  return 0;
}

unsigned ge::Operator::UpdateInputDesc(const char *name, const TensorDesc &) {
  if (const Definition *known = definition_of(last_created))
    for (const auto &one : known->inputs)
      if (!std::strcmp(one.first.GetString(), name)) return 0;
  return 1;
}

// An operator that torchair's wheel does not define is one of ours: known, and nothing more is known of it.
extern "C" unsigned GetRegisteredIrDef(const char *type, Fields &inputs, Fields &outputs, Fields &attributes) {
  if (const Definition *known = definition_of(type)) {
    inputs = known->inputs;
    outputs = known->outputs;
    attributes = known->attributes;
  }
  return 0;
}

extern "C" const char *aclrtGetSocName() {
  const char *chosen = std::getenv("K31_ASCEND_SOC");
  return chosen ? chosen : "Ascend910_9391";
}
