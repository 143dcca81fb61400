#!/bin/sh
# Kubernetes' API server, controllers and scheduler into the folder that is named, for
# tests/kubernetes: built from the sources of Debian 12, with its Go; etcd and Go by apt, as root,
# where they are missing. 34 MB to load and minutes to build, once. What cannot be
# had is said: those tests are then skipped, with the reason.
set -eu
mkdir -p "$1"
folder=$(cd "$1" && pwd)
done="$folder/.installed-2" # 2: takes objects of custom types
[ ! -e "$done" ] || exit 0
skip() {
  echo "$1; the tests of Kubernetes are skipped" >&2
  exit 0
}
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
  skip "etcd and Go are not installed, and only apt as root could"
fi
grep -q "^VERSION_CODENAME=bookworm" /etc/os-release || skip "the sources are of Debian 12; this is not"
export DEBIAN_FRONTEND=noninteractive
install() {
  # The lock may be held for a while by the system's own updates.
  apt-get -o DPkg::Lock::Timeout=300 install -qq -y --no-install-recommends \
    etcd-server golang-go golang-github-modern-go-reflect2-dev dpkg-dev patch >/dev/null
}
install || { apt-get -o DPkg::Lock::Timeout=300 update -qq && install; } ||
  skip "apt could not install etcd and Go"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Lists of our own, made of the system's, which stay as they are.
mkdir -p "$work/lists/partial" "$work/parts"
for list in /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list; do
  [ ! -e "$list" ] || sed -e 's/^Types: deb$/Types: deb-src/' -e 's/^deb /deb-src /' "$list" \
    >"$work/parts/debian.${list##*.}"
done
sources() {
  apt-get -o Dir::Etc::SourceList=- -o Dir::Etc::SourceParts="$work/parts" \
    -o Dir::State::Lists="$work/lists" "$@"
}
sources update -qq || skip "Debian's list of sources could not be loaded"
cd "$work"
sources source -qq kubernetes >/dev/null 2>&1 || skip "the sources of Kubernetes could not be loaded"

export GOPATH="$work/go" GO111MODULE=off GOCACHE="$work/cache"
mkdir -p "$GOPATH/src/k8s.io"
mv kubernetes-*/ "$GOPATH/src/k8s.io/kubernetes" # unpacked and patched by dpkg-source
cd "$GOPATH/src/k8s.io/kubernetes"
# Built by a Go from 1.18 on, the server ends at the first object of a custom type: the reflect2 in
# its sources is too old. Debian's own is not.
rm vendor/github.com/modern-go/reflect2/*.go
cp /usr/share/gocode/src/github.com/modern-go/reflect2/* vendor/github.com/modern-go/reflect2/
# What the API server says about its types is generated, and not part of the sources.
go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen ||
  skip "openapi-gen could not be built"
packages=$(grep -rl --include='*.go' '+k8s:openapi-gen=' staging/src/k8s.io pkg vendor/k8s.io/kube-openapi |
  xargs -n 1 dirname | sort -u |
  grep -v -e sample- -e code-generator -e testing -e example -e /test |
  sed -e 's,^staging/src/,,' -e 's,^vendor/,,' -e 's,^pkg/,k8s.io/kubernetes/pkg/,')
"$work/openapi-gen" --go-header-file hack/boilerplate/boilerplate.generatego.txt \
  --output-base "$GOPATH/src" --output-package k8s.io/kubernetes/pkg/generated/openapi \
  -O zz_generated.openapi --report-filename "$work/report" \
  $(printf -- '--input-dirs %s ' $packages) || skip "openapi-gen failed"
for server in kube-apiserver kube-controller-manager kube-scheduler; do
  go build -o "$folder/$server" "./cmd/$server" || skip "$server could not be built"
done
touch "$done"
