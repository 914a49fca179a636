#!/bin/bash
# Pid 1 of one machine: `machine.sh NAME KIND FOLDER PATH…` gives it a name and its own view of the file system, says
# "ready", and from then on only reaps. KIND is head, node, ssh or laptop; FOLDER is the lab's; each PATH must stay visible.
# The other machines start with a copy of the head's mounts: they share them unless they mount something over them.
set -euo pipefail
name=$1 kind=$2 folder=$3 keep=("${@:4}")
private=$folder/private/$name

# Mount another folder over $1, which shows only the folders below $1 that must stay visible.
cover() {
    local stage=$private$1 path
    mkdir -p "$stage"
    for path in "${keep[@]}"; do
        if [[ $path == "$1"/* ]]; then
            mkdir -p "$stage${path#"$1"}"
            mount --rbind "$path" "$stage${path#"$1"}"
        fi
    done
    mount --rbind "$stage" "$1"
}

# Let other users pass through $1 and all folders above it: the repository may be in a private folder.
open_the_way_through() {
    [[ $1 == / ]] || open_the_way_through "$(dirname "$1")"
    if [[ $(stat -c %A "$1") != *[xt] ]]; then
        cover "$1"
    fi
}

make_homes() {
    cover ~root
    cover /home
    install -d -o 2000 -g 2000 -m 750 /home/gpt
}

echo "$name" >/proc/sys/kernel/hostname
mkdir -p "$private"
mount -t tmpfs -o mode=755 lab "$private"
mount -t tmpfs -o mode=1777 lab /dev/shm
mount -t sysfs lab /sys || true # shows this machine's network interfaces; nothing here depends on it

case $kind in
head)
    make_homes
    for path in "${keep[@]}"; do
        open_the_way_through "$(dirname "$path")"
    done
    cover /run
    mkdir -m 755 /run/{munge,mysqld,sshd,lock}
    for file in hosts nsswitch.conf passwd group shadow; do
        mount --bind "$folder/etc/$file" "/etc/$file"
    done
    if [[ -d $folder/etc/login ]]; then
        mount --bind "$folder/etc/login" /etc/slurm
    fi
    # A small file system, for tests of a full disk.
    mount -t tmpfs -o size=4m,mode=1777 lab "$folder/small"
    # The clients of Slurm are replaced for all machines at once, whatever PATH says; an overlay can also hide one.
    mount --bind /usr/bin "$folder/real"
    mkdir "$private"/{clients,work}
    cp "$folder"/clients/* "$private/clients"
    mount -t overlay -o "lowerdir=/usr/bin,upperdir=$private/clients,workdir=$private/work" lab /usr/bin
    ;;
node)
    mount --bind "$folder/etc/slurm" /etc/slurm # the head's own file may point to the proxy
    ;;
ssh)
    make_homes
    ;;
laptop)
    # Not a part of the cluster: no Slurm, and none of the cluster's folders.
    make_homes
    mount -t tmpfs lab "$folder/shared"
    mount -t tmpfs lab /etc/slurm
    # An overlay of its own: a mount over a file of the head's would vanish when a test replaces that file there.
    mkdir "$private"/{clients,work}
    mount -t overlay lab -o "lowerdir=$folder/real,upperdir=$private/clients,workdir=$private/work" /usr/bin
    for client in "$folder"/clients/*; do
        rm "/usr/bin/${client##*/}"
    done
    ;;
esac

echo ready
exec >/dev/null
sleep infinity &
while true; do wait; done
