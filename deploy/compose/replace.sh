#!/bin/sh
# Replaces the containers of a service one by one by ones of the present image and settings: replace.sh SERVICE
#
# Each new one is up and well before an old one is asked to stop, and that one may finish what it has. Which project and
# files is said as for Compose itself, by COMPOSE_PROJECT_NAME and COMPOSE_FILE, in the folder of docker-compose.yml.
set -eu
service=${1:?which service?}
if command -v docker-compose >/dev/null; then compose=docker-compose; else compose="docker compose"; fi

old=$($compose ps -q "$service")
count=$(echo "$old" | grep -c .)
for container in $old; do
    $compose up -d --no-deps --no-recreate --scale "$service=$((count + 1))" "$service"
    for new in $($compose ps -q "$service"); do
        case $old in *"$new"*) continue ;; esac
        until [ "$(docker inspect --format '{{.State.Health.Status}}' "$new")" = healthy ]; do
            [ "$(docker inspect --format '{{.RestartCount}}' "$new")" = 0 ] || {
                docker logs --tail 1 "$new" >&2
                echo "replace: a new container of $service does not start; the old ones are left as they are" >&2
                exit 1
            }
            sleep 0.5
        done
    done
    docker stop "$container" >/dev/null
    docker rm "$container" >/dev/null
done
