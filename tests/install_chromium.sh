#!/bin/sh
# Chromium from the distribution, for the tests of `trainckpt report --html`: as root, by apt, and
# only where it is missing. Without root or apt it says so and does nothing: those tests are then
# skipped, with the reason.
set -eu
! command -v chromium >/dev/null 2>&1 || exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
  echo "chromium is not installed, and only apt as root could; what needs it is skipped" >&2
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
install() {
  # The lock may be held for a while by the system's own updates.
  apt-get -o DPkg::Lock::Timeout=300 install -qq -y --no-install-recommends \
    chromium fonts-dejavu-core >/dev/null
}
install || { apt-get -o DPkg::Lock::Timeout=300 update -qq && install; } ||
  echo "apt could not install chromium; what needs it is skipped" >&2
