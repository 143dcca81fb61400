#!/bin/sh
# Azurite by npm into the folder that is named, for the tests of az://; npm itself by apt, as root,
# where it is missing. Quick once it is there. What cannot be installed is said: those tests are then
# skipped, with the reason.
set -eu
folder=$1 version=3.35.0
done="$folder/.installed-$version"  # an install that was interrupted leaves its folders too
[ ! -e "$done" ] || exit 0
skip() {
  echo "$1; the tests of az:// are skipped" >&2
  exit 0
}
if ! command -v npm >/dev/null 2>&1; then
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    skip "npm is not installed, and only apt as root could"
  fi
  export DEBIAN_FRONTEND=noninteractive
  install() {
    # The lock may be held for a while by the system's own updates.
    apt-get -o DPkg::Lock::Timeout=300 install -qq -y --no-install-recommends npm >/dev/null
  }
  install || { apt-get -o DPkg::Lock::Timeout=300 update -qq && install; } ||
    skip "apt could not install npm"
fi
npm install --loglevel=error --no-audit --no-fund --ignore-scripts --prefix "$folder" \
  "azurite@$version" >/dev/null || skip "npm could not install Azurite"
touch "$done"
