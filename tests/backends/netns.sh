# Two network namespaces joined by a pair of virtual interfaces, one rank in each: netns.sh PYTHON SCRIPT.
# Start it in a network namespace of its own. Exit status 77: this machine does not allow it.
ip link set lo up || exit 77
unshare --net sleep 120 &
other=$!
trap 'kill $other' EXIT
for _ in 1 2 3 4 5 6 7 8 9 10; do
    [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/$$/ns/net)" ] && break
    sleep 0.1
done
ip link add shard0 type veth peer name shard1 netns "$other" || exit 77
ip addr add 10.77.0.1/24 dev shard0 && ip link set shard0 up || exit 77
inside() { nsenter --target "$other" --net "$@"; }
inside ip addr add 10.77.0.2/24 dev shard1 && inside ip link set shard1 up && inside ip link set lo up || exit 77
GLOO_SOCKET_IFNAME=shard0 "$1" "$2" 0 10.77.0.1 29777 &
first=$!
GLOO_SOCKET_IFNAME=shard1 inside "$1" "$2" 1 10.77.0.1 29777
second=$?
wait $first && exit $second
