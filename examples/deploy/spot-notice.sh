#!/bin/bash
# On a spot machine of AWS: waits for the notice, which comes two minutes before the end, and tells Ray that the node goes.
service=${METADATA_SERVICE:-http://169.254.169.254}/latest

until token=$(curl -sf -X PUT "$service/api/token" -H "X-aws-ec2-metadata-token-ttl-seconds: 60") &&
  curl -sf "$service/meta-data/spot/instance-action" -H "X-aws-ec2-metadata-token: $token"; do
  sleep "${POLL_S:-5}"
done
ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "spot notice" --deadline-remaining-seconds 110
