#!/bin/sh
# Makes the password of the Secret the password of the user, after every start of the
# container: the image itself sets it only when it creates the data directory.
# A failure is logged and not fatal: a running server with the old password is worth more.
set -u

log() {
  # To the output of the server, where people look.
  echo "set-password: $*" 2>/dev/null >/proc/1/fd/2 || true
}

export PGCONNECT_TIMEOUT=5

# While it creates the data directory the image runs a server that listens on its socket
# only, so an answer on the pod's address is the real one's.
waited=0
until pg_isready --quiet --host="$POD_IP"; do
  waited=$((waited + 1))
  if [ "$waited" -gt 600 ]; then
    log "the server does not answer; the password was not checked"
    exit 0
  fi
  sleep 1
done

# The pod's address asks for the password, the loopback address and the socket do not.
if PGPASSWORD=$(cat "$POSTGRES_PASSWORD_FILE") \
  psql --no-psqlrc --no-password --host="$POD_IP" --dbname=postgres --command='SELECT 1' >/dev/null 2>&1; then
  exit 0
fi

# The password is read by psql, so that no list of processes shows it, and this session
# writes no statement to the server's log. psql repeats statements in its errors.
if psql --no-psqlrc --no-password --quiet --set=ON_ERROR_STOP=1 --dbname=postgres >/dev/null 2>&1 <<'SQL'
SET log_statement = 'none';
SET log_min_duration_statement = -1;
SET log_min_duration_sample = -1;
SET log_transaction_sample_rate = 0;
SET log_min_error_statement = 'panic';
SET pg_stat_statements.track_utility = off;
\set password `cat "$POSTGRES_PASSWORD_FILE"`
ALTER ROLE CURRENT_USER PASSWORD :'password';
SQL
then
  log "the user $PGUSER has the new password"
else
  log "the password of the user $PGUSER could not be set; does the user exist?"
fi
