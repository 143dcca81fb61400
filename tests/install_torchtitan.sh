#!/bin/sh
# torchtitan in an environment of its own, inside and over the one that is named: it needs older
# datasets and fsspec than the other tests. Quick once it is there. What cannot be installed is said:
# its tests are then skipped.
set -eu
over=$1 version=0.3.0
own=$over/torchtitan
done="$own/.installed-$version"
[ ! -e "$done" ] || exit 0
skip() {
  echo "$1; the tests of torchtitan are skipped" >&2
  exit 0
}
folder() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
"$over/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  skip "torchtitan needs Python 3.11"
"$over/bin/python" -m venv "$own"
echo "import site; site.addsitedir('$(folder "$over")')" >"$(folder "$own")/over.pth"
grep -Ev '^(datasets|fsspec|s3fs|gcsfs|adlfs)==' constraints.txt >"$own/constraints.txt"
"$own/bin/pip" install -q --disable-pip-version-check -c "$own/constraints.txt" \
  "torchtitan==$version" || skip "pip could not install torchtitan"
touch "$done"
