#!/usr/bin/env bash
# One device against two, where they are separate: loop devices on images in FOLDER, each limited to so many bytes a second.
# As root; cgroup v1 with blkio. FOLDER had better be in memory (tmpfs), so that what is below limits nothing.
#
#   bench/ssd/two_devices.sh FOLDER [BYTES_PER_SECOND] [ARGUMENTS of kvlane bench ssd]
set -euo pipefail
folder=$1 rate=${2:-200000000}
shift $(($# < 2 ? 1 : 2))
group=/sys/fs/cgroup/blkio/kvlane-bench-$$
devices=() mounts=()

end() {
    for mount in "${mounts[@]}"; do umount "$mount" && rmdir "$mount"; done
    for device in "${devices[@]}"; do losetup --detach "$device"; done
    rm -f "$folder"/kvlane-{0,1}.image
    echo $$ > /sys/fs/cgroup/blkio/cgroup.procs
    rmdir "$group"
}
trap end EXIT

mkdir "$group"
for number in 0 1; do
    image=$folder/kvlane-$number.image
    truncate --size 2G "$image"
    device=$(losetup --find --show "$image")
    devices+=("$device")
    mkfs.ext4 -q -E lazy_itable_init=0,lazy_journal_init=0 "$device"
    mkdir "$folder/kvlane-$number"
    mount "$device" "$folder/kvlane-$number"
    mounts+=("$folder/kvlane-$number")
    name=$((0x$(stat --format %t "$device"))):$((0x$(stat --format %T "$device")))
    echo "$name $rate" > "$group/blkio.throttle.read_bps_device"
    echo "$name $rate" > "$group/blkio.throttle.write_bps_device"
done
# From here on this process, and what it starts, is limited.
echo $$ > "$group/cgroup.procs"
flags=(--capacity 512m --phase-bytes 256m --restart-blocks 2000 --rounds 2 --vs none "$@")
kvlane bench ssd "${mounts[0]}" "${flags[@]}" --out out/one
kvlane bench ssd "${mounts[@]}" "${flags[@]}" --out out/two
python3 - <<'PYTHON'
import json

one, two = (json.load(open(f"out/{name}/ssd.json")) for name in ("one", "two"))
for alone, both in zip(one["sizes"], two["sizes"]):
    for op in ("read", "write"):
        of = [size["medians"][f"kvlane {op}"]["gb_per_s"] for size in (alone, both)]
        print(f"{op} {alone['block_bytes'] >> 10} KiB: one {of[0]:.3f}, two {of[1]:.3f} GB/s, {of[1] / of[0]:.2f}x")
PYTHON
