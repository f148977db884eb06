-- Times are milliseconds since the Unix epoch. JSON is text. The same tables as for PostgreSQL.
CREATE TABLE tokens (
    id TEXT PRIMARY KEY NOT NULL,
    hash TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    email TEXT NOT NULL,
    cluster_id TEXT,
    created_at INTEGER NOT NULL,
    revoked_at INTEGER
);

CREATE TABLE clusters (
    id TEXT PRIMARY KEY NOT NULL,
    name TEXT NOT NULL UNIQUE,
    config TEXT NOT NULL,
    version INTEGER NOT NULL,
    git_url TEXT,
    repository TEXT NOT NULL,
    branch TEXT NOT NULL,
    path TEXT NOT NULL,
    credentials BLOB,
    age_recipient TEXT,
    created_at INTEGER NOT NULL,
    UNIQUE (repository, branch, path)
);

CREATE TABLE environments (
    id TEXT PRIMARY KEY NOT NULL,
    cluster_id TEXT NOT NULL REFERENCES clusters (id),
    name TEXT NOT NULL,
    config TEXT NOT NULL,
    version INTEGER NOT NULL,
    -- Deployments ever created: decides the shard of the next one.
    allocated INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    UNIQUE (cluster_id, name)
);

CREATE TABLE deployments (
    id TEXT PRIMARY KEY NOT NULL,
    environment_id TEXT NOT NULL REFERENCES environments (id),
    name TEXT NOT NULL,
    shard INTEGER NOT NULL,
    driver_name TEXT NOT NULL,
    driver_digest TEXT NOT NULL,
    driver_pin TEXT,
    application_version TEXT NOT NULL,
    config TEXT NOT NULL,
    parameters TEXT NOT NULL,
    lifecycle TEXT NOT NULL,
    state TEXT NOT NULL,
    version INTEGER NOT NULL,
    last_sequence INTEGER NOT NULL,
    newest_instance_id TEXT,
    active_instance_id TEXT,
    created_at INTEGER NOT NULL
);
-- A name is free again as soon as its deployment is being deleted: ids tell them apart.
CREATE UNIQUE INDEX deployments_name ON deployments (environment_id, name) WHERE lifecycle <> 'deleting';
CREATE INDEX deployments_environment ON deployments (environment_id, id);

CREATE TABLE secrets (
    deployment_id TEXT NOT NULL REFERENCES deployments (id),
    name TEXT NOT NULL,
    ciphertext BLOB NOT NULL,
    fingerprint TEXT NOT NULL,
    PRIMARY KEY (deployment_id, name)
);

CREATE TABLE instances (
    id TEXT PRIMARY KEY NOT NULL,
    deployment_id TEXT NOT NULL REFERENCES deployments (id),
    sequence INTEGER NOT NULL,
    workflow TEXT NOT NULL,
    spec TEXT NOT NULL,
    origins TEXT NOT NULL,
    document TEXT,
    secrets_file TEXT,
    secrets_stamp TEXT,
    state TEXT NOT NULL,
    revision TEXT,
    task_id TEXT NOT NULL,
    author_name TEXT NOT NULL,
    author_email TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    UNIQUE (deployment_id, sequence)
);

CREATE TABLE tasks (
    id TEXT PRIMARY KEY NOT NULL,
    deployment_id TEXT NOT NULL REFERENCES deployments (id),
    instance_id TEXT NOT NULL REFERENCES instances (id),
    sequence INTEGER NOT NULL,
    workflow TEXT NOT NULL,
    state TEXT NOT NULL,
    message TEXT,
    author_name TEXT NOT NULL,
    author_email TEXT NOT NULL,
    version INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    ended_at INTEGER
);
CREATE INDEX tasks_deployment ON tasks (deployment_id, state);

CREATE TABLE task_steps (
    task_id TEXT NOT NULL REFERENCES tasks (id),
    position INTEGER NOT NULL,
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    message TEXT,
    started_at INTEGER,
    ended_at INTEGER,
    PRIMARY KEY (task_id, position)
);

-- What must reach a repository, oldest first. A row leaves in the transaction that records its push.
CREATE TABLE outbox (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    repository TEXT NOT NULL,
    branch TEXT NOT NULL,
    kind TEXT NOT NULL,
    subject_id TEXT NOT NULL,
    author_name TEXT NOT NULL,
    author_email TEXT NOT NULL,
    created_at INTEGER NOT NULL
);
CREATE INDEX outbox_repository ON outbox (repository, branch, id);

-- Commits that were made and perhaps pushed: the remote's history decides.
CREATE TABLE batches (
    commit_id TEXT PRIMARY KEY NOT NULL,
    repository TEXT NOT NULL,
    branch TEXT NOT NULL,
    base TEXT,
    rows TEXT NOT NULL,
    state TEXT NOT NULL,
    created_at INTEGER NOT NULL
);
CREATE INDEX batches_repository ON batches (repository, branch, state);

CREATE TABLE driver_versions (
    digest TEXT PRIMARY KEY NOT NULL,
    name TEXT NOT NULL,
    version TEXT NOT NULL,
    files TEXT NOT NULL,
    loaded_at INTEGER NOT NULL,
    UNIQUE (name, version)
);
