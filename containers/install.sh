#!/bin/sh
# Installs asyncpp from a source tree into a virtual environment, in an image of Debian with Python.
#   install.sh SOURCE TARGET DEVICE      DEVICE: cpu, or cuda for torch's wheel with the CUDA libraries
# TORCH_INDEX, if set, is the package index for torch instead of PyTorch's own or PyPI.
set -eu
source=$1 target=$2 device=$3

case $device in
    cpu) index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu} ;;
    cuda) index=${TORCH_INDEX:-} ;;
    *)
        echo "DEVICE is '$device'; accepted: cpu, cuda" >&2
        exit 2
        ;;
esac

# torch.compile needs a compiler where it runs.
apt-get update
apt-get install -y --no-install-recommends g++
# Without these NCCL falls back to TCP on InfiniBand and RoCE, and says so in its log only.
if [ "$device" = cuda ]; then
    apt-get install -y --no-install-recommends libibverbs1 ibverbs-providers librdmacm1
fi
rm -rf /var/lib/apt/lists/*

python3 -m venv "$target"
torch=$("$target/bin/python" - "$source/pyproject.toml" <<'PYTHON'
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    dependencies = tomllib.load(file)["project"]["dependencies"]
print(next(name for name in dependencies if name.startswith("torch")))
PYTHON
)
"$target/bin/pip" install --no-cache-dir ${index:+--index-url "$index"} "$torch"
"$target/bin/pip" install --no-cache-dir "$source[data]"
