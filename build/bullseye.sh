#!/bin/sh
# A Debian 11 folder in which the executable is built, so that it runs wherever there is glibc 2.31 (DESIGN.md).
#
#     build/bullseye.sh ROOT [MIRROR SECURITY_MIRROR]
#
# As root, on Debian, with debootstrap. It is made once (some minutes) and is then used again by build/executable.py,
# which is told of it by --root. Made of: Debian 11 with a compiler; OpenSSL 3 and Python 3.11 from Debian 12's sources,
# with Debian's security fixes, compiled here. Mirrors are those of this machine's apt, unless others are given.
# An interrupted run is taken up again, and one of an older recipe from where they differ: each step leaves a mark in
# ROOT/var/lib/kvstream.
set -eu

[ $# = 1 ] || [ $# = 3 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
root=$1

mirror() { # label of the archive
    apt-get indextargets --format '$(LABEL)|$(REPO_URI)' 'Created-By: Packages' | sed -n "s/^$1|//p" | head -n 1
}

main=${2:-$(mirror Debian)}
security=${3:-$(mirror Debian-Security)}
if [ -z "$main" ] || [ -z "$security" ]; then
    echo "no Debian mirror is in this machine's apt configuration: name two, the archive's and the security archive's" >&2
    exit 2
fi

# Mounts of its own, which end with it. Without /dev/shm Python is configured without semaphores, and hypercorn with that
# Python does not start.
inside() {
    unshare --mount --pid --fork --kill-child sh -euc '
        root=$1; shift
        mount -t proc proc "$root/proc"
        mount --rbind /dev "$root/dev"
        mount -t tmpfs tmpfs "$root/tmp"
        exec chroot "$root" env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TZ=UTC LC_ALL=C.UTF-8 \
            DEBIAN_FRONTEND=noninteractive SOURCE_DATE_EPOCH=1767225600 MAKEFLAGS="-j$(nproc)" \
            sh -euc "$@"' sh "$root" "$@"
}

steps= # what the steps so far are made of
step() { # its name, and files it reads; what is run inside comes from standard input
    name=$1; shift
    script=$(cat)
    steps=$( { echo "$steps$script"; cat /dev/null "$@"; } | sha256sum)
    mark=$root/var/lib/kvstream/$name
    [ ! -e "$mark" ] || [ "$(cat "$mark")" != "$steps" ] || return 0
    echo "$name ..."
    [ $# = 0 ] || cp "$@" "$root/usr/src"
    log=$root/var/log/kvstream-$name.log
    inside "$script" > "$log" 2>&1 < /dev/null || { tail -n 30 "$log" >&2; echo "$name failed; more is in $log" >&2; exit 1; }
    mkdir -p "$root/var/lib/kvstream"
    echo "$steps" > "$mark"
}

[ -e "$root/etc/debian_version" ] && [ ! -d "$root/debootstrap" ] \
    || debootstrap --variant=minbase bullseye "$root" "$main" > /dev/null
cp /etc/resolv.conf "$root/etc/resolv.conf"
cat > "$root/etc/apt/sources.list" <<END
deb $main bullseye main
deb $main bullseye-updates main
deb $security bullseye-security main
deb-src $main bookworm main
deb-src $security bookworm-security main
END
# The newest version of a source package that this mirror really has (some list what is gone), its signatures checked by
# apt; unpacked, with Debian's patches unless --download-only.
cat > "$root/usr/local/bin/fetch-source" <<'END'
#!/bin/sh -eu
name=$1; shift
mkdir -p "/usr/src/$name"
cd "/usr/src/$name"
for version in $(apt-cache showsrc --only-source "$name" | sed -n 's/^Version: //p' | sort -rVu); do
    rm -rf ./*
    if apt-get source "$@" "$name=$version"; then
        echo "$version" > version
        exit 0
    fi
done
exit 1
END
chmod 0755 "$root/usr/local/bin/fetch-source"

step base <<'END'
apt-get update
apt-get upgrade -y
END

# What is not here is not compiled into Python, and not shipped: readline (GPL), curses, databases.
step packages <<'END'
apt-get install -y --no-install-recommends gcc g++ make binutils dpkg-dev patch xz-utils perl \
    zlib1g-dev libffi-dev liblzma-dev libbz2-dev libexpat1-dev libzstd-dev
END

# Debian 11 has 1.1.1, whose support has ended. It becomes a package, so that build/notices.py finds its licence and its
# version as it does for every other library.
step openssl <<'END'
fetch-source openssl
cd /usr/src/openssl/openssl-*/
./Configure "linux-$(uname -m)" --prefix=/usr/local --libdir=lib --openssldir=/usr/lib/ssl shared no-tests no-module \
    no-idea no-mdc2 no-rc5 no-zlib no-ssl3 no-ssl3-method -fstack-protector-strong -D_FORTIFY_SOURCE=2 -Wl,-z,relro
make build_sw
made=/usr/src/openssl/made
make -j1 install_sw DESTDIR=$made
strip --strip-unneeded $made/usr/local/lib/lib*.so.*
install -D -m 0644 debian/copyright $made/usr/share/doc/kvstream-openssl/copyright
mkdir -p $made/DEBIAN
{
    echo "Package: kvstream-openssl"
    echo "Version: $(cat ../version)"
    echo "Architecture: $(dpkg --print-architecture)"
    echo "Maintainer: nobody <nobody@localhost>"
    echo "Description: OpenSSL 3 from the sources of Debian 12, for the build of KVStream"
} > $made/DEBIAN/control
dpkg-deb --build $made /usr/src/openssl/made.deb
dpkg --install /usr/src/openssl/made.deb
ldconfig
END

# Of Debian's patches those that mend: all from this one on. Those before it move files to where Debian wants them.
# Compiled twice: what training.py made the first one do is where the second one is made fast (a fifth of the time that a
# start takes). Python's own target trains with tests, whose profile is another one each time, and counts what make did
# with the first one, too.
step python "$(dirname "$0")/training.py" <<'END'
fetch-source python3.11 --download-only
cd /usr/src/python3.11
tar xf python3.11_*.orig.tar.*
tar xf python3.11_*.debian.tar.*
cd Python-3.11.*/
grep -qx shutdown-deadlock.diff ../debian/patches/series
sed -n '/^shutdown-deadlock.diff$/,$p' ../debian/patches/series | while read -r name; do
    patch --strip=1 --fuzz=0 < "../debian/patches/$name"
done
# One of them wants this, which Debian gives to a module that it links into the program.
sed -i '1i #define Py_BUILD_CORE_MODULE 1' Modules/pyexpat.c
CFLAGS="-fstack-protector-strong -D_FORTIFY_SOURCE=2" LDFLAGS="-Wl,-z,relro" ./configure --enable-shared \
    --with-openssl=/usr/local --with-system-expat --with-ensurepip=install --disable-test-modules \
    --without-static-libpython --enable-optimizations --with-lto LDFLAGS_NODIST=-Wl,-Bsymbolic-functions
make profile-gen-stamp
find . -name '*.gcda' -delete
LD_LIBRARY_PATH=$PWD PYTHONHASHSEED=0 setarch --addr-no-randomize ./python -B -S /usr/src/training.py
test -s Objects/dictobject.gcda
make clean-retain-profile
touch profile-run-stamp
make
make -j1 install
ldconfig
python3.11 -c "import bz2, ctypes, hashlib, lzma, multiprocessing.synchronize, pyexpat, ssl, zlib; print(ssl.OPENSSL_VERSION)"
END

echo "$root: $(tail -n 1 "$root/var/log/kvstream-python.log"), Python $(cat "$root/usr/src/python3.11/version")"
