#!/bin/sh
# Make the image that docker/Dockerfile.peer begins with from Debian's packages, for where no registry
# of images is reachable: `make images-from-debian`. It has the Python of the release of Debian that
# PYTHON_IMAGE names there, from the mirrors that apt uses on this machine.
#
# Usage: docker/make_base_image.sh IMAGE, by root or a normal user. Needs Debian's buildah, mmdebstrap
# and uidmap.
set -eu

image=$1
dockerfile=$(dirname "$0")/Dockerfile.peer
release=$(sed -n 's/^ARG PYTHON_IMAGE=.*-//p' "$dockerfile")

fail() {
    echo "make_base_image.sh: $*" >&2
    exit 1
}

for program in apt-get buildah mmdebstrap newuidmap; do
    command -v "$program" >/dev/null ||
        fail "no $program; on Debian: apt-get install buildah mmdebstrap uidmap"
done

# What a kernel or an administrator may forbid. Root needs no user namespace.
[ "$(id -u)" = 0 ] || buildah unshare true ||
    fail "cannot make a user namespace with more than one user;" \
    "see /proc/sys/user/max_user_namespaces (0 forbids it)," \
    "/proc/sys/kernel/unprivileged_userns_clone where there is one (0 forbids it)," \
    "and whether /etc/subuid and /etc/subgid have a line for $(id -un)"

sources=$(apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' \
    'Created-By: Packages' 'Origin: Debian' | sort -u | grep -E " $release(-(updates|security))? ") ||
    fail "apt has no lists of Debian $release; name a mirror of it in /etc/apt/sources.list.d" \
        "and run apt-get update"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
echo "$sources" | mmdebstrap --quiet --mode="$([ "$(id -u)" = 0 ] && echo root || echo unshare)" \
    --variant=minbase --include=ca-certificates,python3,python3-venv "$release" "$folder/root.tar" -
echo 'FROM scratch
ADD root.tar /
CMD ["python3"]' | buildah build --quiet -t "$image" -f - "$folder"
