#!/usr/bin/env bash
# Runs a command on a disk in memory: a loop device on tmpfs, or zram. As root.
#
#   bench/ssd/on_memory.sh loop|zram COMMAND [ARGUMENTS]    with the folder of the disk as last argument
set -euo pipefail
kind=$1
shift
image=/dev/shm/kvlane-bench-$$.image folder=$(mktemp --directory)
case $kind in
loop)
    truncate --size 3G "$image"
    device=$(losetup --find --show --direct-io=on "$image")
    ;;
zram)
    number=$(cat /sys/class/zram-control/hot_add)
    device=/dev/zram$number
    echo 3G > "/sys/block/zram$number/disksize"
    ;;
*)
    echo "loop or zram, not $kind" >&2
    exit 2
    ;;
esac

end() {
    umount "$folder" || true
    rmdir "$folder"
    case $kind in
    loop)
        losetup --detach "$device"
        rm -f "$image"
        ;;
    zram)
        echo 1 > "/sys/block/zram$number/reset"
        echo "$number" > /sys/class/zram-control/hot_remove
        ;;
    esac
}
trap end EXIT
mkfs.ext4 -q -E lazy_itable_init=0,lazy_journal_init=0 "$device"
mount "$device" "$folder"
"$@" "$folder"
