#!/bin/sh
# Makes the password of the Redis in the cluster, once: passwords.sh overlays/cluster
#
# Writes secrets/url, which the front ends and workers get, and secrets/users.acl, which Redis gets and which holds
# only the password's hash. Both stay out of git.
set -eu
cd "$(dirname "$0")/${1:?which overlay?}"
test ! -e secrets/url || { echo "$1/secrets is there already" >&2; exit 1; }
umask 077
mkdir -p secrets
password=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
hash=$(printf %s "$password" | sha256sum | cut -d' ' -f1)
sed "s/PASSWORD/#$hash/" ../../redis/users.acl > secrets/users.acl
printf 'redis://tokenmill:%s@tokenmill-redis:6379/0' "$password" > secrets/url
