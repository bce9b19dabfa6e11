#!/bin/sh
# Machine B: take the bundle in and serve. Needs K31_CACHE_KEY for the import and no compiler at all.
#   run.sh BUNDLE         in the folder of the model; K31 is the command, PYTHON the interpreter
set -eu
K31=${K31:-k31}
PYTHON=${PYTHON:-python}
$K31 cache import "$1"
unset K31_CACHE_KEY     # what was imported is signed with this machine's own key
export K31_REQUIRE_WARM=1
$PYTHON serve.py
