#!/bin/sh
# Makes the base image on hosts that cannot pull images: `deploy/docker/base-image.sh [IMAGE]`, as root, on Debian.
#
# debootstrap fetches a minimal Debian 12 from a package mirror (MIRROR=, else its own default), and what this host
# trusts and how its pip is configured goes into it, so that builds reach what the host reaches. IMAGE is the name that
# the Dockerfiles start from, `debian:bookworm-slim` by default. Not for images that are given away: they hold the
# host's certificates and pip's configuration.
set -eu

image=${1:-debian:bookworm-slim}
work=$(mktemp -d "${TMPDIR:-/tmp}/base-image.XXXXXX")
trap 'rm -rf "$work"' EXIT
root=$work/root
mkdir -m 755 "$root"

command -v debootstrap >/dev/null || { echo "base-image: debootstrap is needed (apt install debootstrap)" >&2; exit 1; }
debootstrap --variant=minbase bookworm "$root" ${MIRROR:+"$MIRROR"} >"$work/log" 2>&1 || {
    tail -n 5 "$work/log" >&2
    exit 1
}
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* \
    "$root"/usr/share/doc/* "$root"/usr/share/man/* "$root"/usr/share/locale/*
# As in images that are pulled: apt leaves neither packages nor its own cache in a layer.
cat >"$root/etc/apt/apt.conf.d/docker-clean" <<'APT'
DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb || true"; };
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
APT

# A file of the host, at the same place in the image.
take() {
    [ -f "$1" ] || return 0
    mkdir -p "$root$(dirname "$1")"
    cat "$1" >"$root$1"
}

# What the host trusts, one file each: Debian makes the bundle anew from them when an image installs ca-certificates.
bundle=/etc/ssl/certs/ca-certificates.crt
take "$bundle"
if [ -f "$bundle" ]; then
    trusted=$root/usr/local/share/ca-certificates
    mkdir -p "$trusted"
    awk -v folder="$trusted" '/BEGIN CERTIFICATE/ { file = folder "/host-" ++n ".crt" } file { print > file }
        /END CERTIFICATE/ { close(file); file = "" }' "$bundle"
fi
set --
if command -v pip >/dev/null; then
    # The files that pip reads, those that they name, and what the environment adds.
    for file in $(pip config debug | sed -n 's/^ *\(\/.*\), exists: True$/\1/p') \
        $(pip config list | sed -n "s/^[^=]*\.\(cert\|constraint\)='\(.*\)'$/\2/p"); do
        take "$file"
    done
    for name in PIP_CERT PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_TRUSTED_HOST; do
        value=$(printenv "$name") && set -- "$@" --change "ENV $name=\"$value\""
    done
fi

tar -C "$root" -c . | docker import "$@" --change 'CMD ["bash"]' - "$image" >/dev/null
echo "base-image: made $image from Debian $(cat "$root/etc/debian_version")"
