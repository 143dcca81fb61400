#!/bin/sh
# Prometheus, promtool and node_exporter from the distribution, for tests/metrics: unpacked into the folder
# $1, so that no service is set up. Without Debian's tools or its mirror it says so and does nothing: the tests that
# need it are then skipped, with the reason.
set -eu
into=$1
packages="prometheus prometheus-node-exporter"
[ ! -x "$into/usr/bin/prometheus" ] || [ ! -x "$into/usr/bin/prometheus-node-exporter" ] || exit 0
if ! command -v apt-get >/dev/null 2>&1 || ! command -v dpkg-deb >/dev/null 2>&1; then
  echo "no apt-get and dpkg-deb here; the tests that need Prometheus are skipped" >&2
  exit 0
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
download() { apt-get download -qq $packages >/dev/null 2>&1; }
download || { apt-get update -qq >/dev/null 2>&1 && download; } || {
  echo "apt-get could not download prometheus; the tests that need it are skipped" >&2
  exit 0
}
cd "$OLDPWD"
mkdir -p "$into"
for package in $packages; do
  dpkg-deb -x "$folder/$package"_*.deb "$into"
done
