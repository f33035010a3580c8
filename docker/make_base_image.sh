#!/bin/sh
# Make the image that docker/Dockerfile.peer begins with from Debian's packages, for where no registry
# of images is reachable: `make images-from-debian`. It has the Python of the release of Debian that
# PYTHON_IMAGE names there, from the mirrors that apt uses on this machine.
#
# Usage: docker/make_base_image.sh IMAGE, by root or a normal user. Needs Debian's buildah, mmdebstrap
# and uidmap.
set -eu

fail() {
    echo "make_base_image.sh: $*" >&2
    exit 1
}

[ $# = 1 ] || fail "give the name of the image to make, such as shoal-python"
release=$(sed -n 's/^ARG PYTHON_IMAGE=.*-//p' "$(dirname "$0")/Dockerfile.peer")

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

# $(…) are fields of apt.
# shellcheck disable=SC2016
sources=$(apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' \
    'Created-By: Packages' 'Origin: Debian' | sort -u | grep -E " $release(-(updates|security))? ") ||
    fail "apt has no lists of Debian $release; name a mirror of it in /etc/apt/sources.list.d" \
        "and run apt-get update"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
echo "$sources" | mmdebstrap --quiet --mode="$([ "$(id -u)" = 0 ] && echo root || echo unshare)" \
    --variant=minbase --include=ca-certificates,python3,python3-venv "$release" "$folder/root.tar" - ||
    fail "mmdebstrap could not make Debian $release, for the reason above; it needs 1 GB in ${TMPDIR:-/tmp}"
echo 'FROM scratch
ADD root.tar /
CMD ["python3"]' | buildah build --quiet -t "$1" -f - "$folder" ||
    fail "buildah could not store the image $1, for the reason above; it needs 1 GB"
