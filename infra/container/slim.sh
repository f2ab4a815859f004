#!/bin/sh
# slim.sh ENVIRONMENT: removes what no process of Penstock imports, loads or runs from a virtual environment.
set -eu
cd "$1"/lib/python3.*/site-packages
# torch's own tests, and what C++ programs are compiled with. torch_shm_manager stays: `import torch` looks for it.
find torch/bin -mindepth 1 ! -name torch_shm_manager -delete
rm -rf torch/test torch/include torch/share torch/lib/*_test.so
find torch -name '*.a' -delete
# Tests of packages. numpy's own stay: numpy.testing imports them.
find . -depth -type d -name tests ! -path './numpy/*' -exec rm -r {} +
