#!/bin/sh
# Slurm, munge and systemd's checker from the distribution, for tests/slurm and tests/configs: as
# root, by apt, and only where something is missing. Without root or apt it says so and does nothing:
# those tests are then skipped, with the reason.
set -eu
PATH="$PATH:/usr/sbin:/sbin"
for program in slurmctld slurmd munged sbatch systemd-analyze; do
  command -v "$program" >/dev/null 2>&1 || missing="${missing:-} $program"
done
[ -n "${missing:-}" ] || exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
  echo "not installed, and only apt as root could:$missing; what needs it is skipped" >&2
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
packages="slurmctld slurmd slurm-client munge systemd"
install() {
  # The lock may be held for a while by the system's own updates.
  apt-get -o DPkg::Lock::Timeout=300 install -qq -y --no-install-recommends $packages >/dev/null
}
install || { apt-get -o DPkg::Lock::Timeout=300 update -qq && install; } ||
  echo "apt could not install$missing; what needs it is skipped" >&2
