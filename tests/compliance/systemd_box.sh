#!/bin/bash
# systemd_box.sh FOLDER: systemd as the init of a machine of its own inside this one. It sees this machine's
# files, and what it writes lies in memory and ends with it. Run by test_systemd.py, as root.
set -e
BOX=$1

if [ "$2" != inside ]; then
    # systemd may only arrange groups that are below one of its own.
    groups=$(findmnt -n -o TARGET -t cgroup2 | head -n 1)
    mkdir "$groups/$(basename "$BOX")"
    echo $$ > "$groups/$(basename "$BOX")/cgroup.procs"
    exec unshare --fork --kill-child --pid --mount --uts --ipc --cgroup --net "$0" "$BOX" inside
fi

mount --make-rprivate /
mount -t tmpfs none "$BOX"
mkdir "$BOX"/{upper,work,root}
mount -t overlay overlay -o "lowerdir=/,upperdir=$BOX/upper,workdir=$BOX/work" "$BOX/root"
cd "$BOX/root"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
mount -t tmpfs -o mode=755 tmpfs dev
mkdir dev/pts dev/shm
for device in null zero full random urandom tty; do
    touch "dev/$device"
    mount --bind "/dev/$device" "dev/$device"
done
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
mount -t tmpfs -o mode=1777 tmpfs dev/shm
# What this machine starts at boot, and what would reach through to its kernel, is not started.
rm -rf etc/systemd/system/*.wants
for unit in systemd-udevd.service systemd-udev-trigger.service systemd-sysctl.service systemd-modules-load.service \
    systemd-pstore.service systemd-binfmt.service systemd-remount-fs.service dev-hugepages.mount dev-mqueue.mount \
    sys-kernel-debug.mount sys-kernel-tracing.mount sys-kernel-config.mount sys-fs-fuse-connections.mount; do
    ln -sf /dev/null "etc/systemd/system/$unit"
done
: > etc/fstab
# An installation in root's own home, as a checkout often is, may be read by the service's user here.
chmod a+rx root
mkdir old
pivot_root . old
umount -l /old
exec env -i container=box PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system --unit=basic.target
