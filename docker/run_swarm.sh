#!/bin/sh
# Run the swarm of compose.yaml with podman, from images that `make images-from-debian` has built:
# `make images-swarm`. Without Grafana, of which neither Debian nor PyPI has a package.
#
# Usage: docker/run_swarm.sh COMMAND [OPTION …], a command of podman-compose such as up or down, or
# docker/run_swarm.sh podman COMMAND …, with the same settings. Needs Debian's podman, podman-compose,
# netavark, aardvark-dns and runc.
set -eu

folder=$(cd "$(dirname "$0")" && pwd)
image=localhost/shoal-prometheus
export CONTAINERS_CONF="$folder/podman.conf" PROMETHEUS_IMAGE=$image

# systemd has the timers of health checks. Without it, `podman healthcheck run NAME` checks once.
[ -d /run/systemd/system ] || export DISABLE_HC_SYSTEMD=true

fail() {
    echo "run_swarm.sh: $*" >&2
    exit 1
}

[ $# -gt 0 ] || fail "give a command of podman-compose, such as up"

for program in buildah podman podman-compose runc; do
    command -v "$program" >/dev/null ||
        fail "no $program; on Debian: apt-get install" \
            "buildah podman podman-compose netavark aardvark-dns runc"
done

[ "$1" != podman ] || exec "$@"

if [ "$1" = up ]; then
    podman image exists localhost/shoal-monitor || fail "no images; first: make images-from-debian"
    podman image exists "$image" ||
        buildah build --quiet --isolation chroot --build-arg PYTHON_IMAGE=localhost/shoal-python \
            -f "$folder/Dockerfile.prometheus" -t "$image" "$folder" ||
        fail "buildah could not build Debian's Prometheus, for the reason above"
    set -- "$@" --no-build join-code bootstrap peer-1 peer-2 peer-3 monitor prometheus
fi
exec podman-compose -p shoal -f "$folder/compose.yaml" "$@"
