#!/bin/sh
# Both machines in one place: two users, two homes, two project folders, and a compiler on the first one only.
#   two_machines.sh FOLDER      K31_CACHE_KEY is the secret that both hold; K31 and PYTHON as in build.sh and run.sh
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
place=$(cd "$1" && pwd)
secret=$K31_CACHE_KEY

mkdir -p "$place/a/home" "$place/a/ci/checkout" "$place/b/root" "$place/b/srv/app" "$place/b/bin"
cp "$here/model.py" "$here/k31.toml" "$place/a/ci/checkout"
cp "$here/model.py" "$here/serve.py" "$place/b/srv/app"

# On B every compiler is one that writes down that it was called, and fails.
for name in g++ c++ gcc cc clang clang++; do
    printf '#!/bin/sh\necho "%s $*" >> "%s/b/compiler-calls"\nexit 1\n' "$name" "$place" > "$place/b/bin/$name"
    chmod +x "$place/b/bin/$name"
done

echo "== machine A"
(
    cd "$place/a/ci/checkout"
    unset K31_CACHE_DIR XDG_CACHE_HOME TORCHINDUCTOR_CACHE_DIR K31_REQUIRE_WARM
    HOME=$place/a/home USER=ci-runner LOGNAME=ci-runner K31_CACHE_KEY=$secret "$here/build.sh" "$place/graphs.k31bundle"
)
echo "== machine B, without the secret"
(
    cd "$place/b/srv/app"
    unset K31_CACHE_DIR XDG_CACHE_HOME TORCHINDUCTOR_CACHE_DIR K31_CACHE_KEY
    if HOME=$place/b/root USER=serve LOGNAME=serve "$here/run.sh" "$place/graphs.k31bundle"; then
        echo "the import should have been refused" >&2
        exit 1
    fi
)
echo "== machine B"
(
    cd "$place/b/srv/app"
    unset K31_CACHE_DIR XDG_CACHE_HOME TORCHINDUCTOR_CACHE_DIR
    HOME=$place/b/root USER=serve LOGNAME=serve PATH="$place/b/bin:$PATH" TMPDIR=$place/b \
        K31_CACHE_KEY=$secret "$here/run.sh" "$place/graphs.k31bundle"
)
if [ -e "$place/b/compiler-calls" ]; then
    echo "machine B called a compiler:" >&2
    cat "$place/b/compiler-calls" >&2
    exit 1
fi
echo "machine B compiled nothing"
