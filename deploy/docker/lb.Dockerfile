# The load balancer in front of the front ends: HAProxy, as Debian ships it.
ARG BASE_IMAGE=debian:bookworm-slim

FROM ${BASE_IMAGE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends haproxy \
    && rm -rf /var/lib/apt/lists/*
COPY deploy/docker/lb/haproxy.cfg /etc/haproxy/haproxy.cfg
COPY deploy/docker/lb/start deploy/docker/http-ok /usr/local/bin/
USER 10001:10001
EXPOSE 8000
# Take no new connections and let the open ones end, up to a limit of its own; SIGTERM would cut them.
STOPSIGNAL SIGUSR1
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s --retries=3 CMD ["http-ok", "8000", "/health"]
CMD ["start"]
