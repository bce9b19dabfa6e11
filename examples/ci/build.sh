#!/bin/sh
# Machine A: warm everything that k31.toml names, and write the bundle. Needs a C++ compiler and K31_CACHE_KEY.
#   build.sh BUNDLE       in the folder of k31.toml; K31 is the command, else `k31`
set -eu
K31=${K31:-k31}
$K31 cache warm k31.toml
$K31 cache warm k31.toml --check
$K31 cache export "$1"
