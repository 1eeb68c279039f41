#!/bin/sh
# Makes the passwords of the Redis in the cluster, once: passwords.sh overlays/cluster
#
# Writes secrets/api-url and secrets/worker-url, which front ends and workers get, secrets/operator-password for whoever
# looks into Redis, which goes nowhere, and secrets/users.acl, which Redis gets and which holds only the passwords'
# hashes. All stay out of git.
set -eu
cd "$(dirname "$0")/${1:?which overlay?}"
test ! -e secrets/users.acl || { echo "$1/secrets is there already" >&2; exit 1; }
umask 077
mkdir -p secrets
users=$(cat ../../../redis/users.acl)
for name in api worker operator; do
    password=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
    hash=$(printf %s "$password" | sha256sum | cut -d' ' -f1)
    upper=$(echo "$name" | tr '[:lower:]' '[:upper:]')
    users=$(printf '%s\n' "$users" | sed "s/PASSWORD_OF_$upper/#$hash/")
    if [ "$name" = operator ]; then
        printf %s "$password" > secrets/operator-password
    else
        printf 'redis://%s:%s@tokenmill-redis:6379/0' "$name" "$password" > "secrets/$name-url"
    fi
done
printf '%s\n' "$users" > secrets/users.acl
