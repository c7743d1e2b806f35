"""What a test needs that may not be installed, and how it is run then."""

TORCH = "needs torch: make torch-env, then WITH_TORCH=1 make test"
RUNC = "needs root and runc: as root, apt-get install runc (make test does it on Debian)"
S3 = "needs obstore and moto: make venv"
CRUN = "needs root and crun: as root, apt-get install crun"
SMOL = "make rig-smol runs these tests in an emulated host that has a KVM of its own"
DELEGATION = (
    "needs root, or a delegated control group: systemd-run --user --scope -p Delegate=yes make "
    "test, or make rig-systemd"
)
PODMAN = "needs root and podman, whose images are tried: as root, apt-get install podman"
