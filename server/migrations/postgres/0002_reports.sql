-- What the agents say. Only the reports room writes here.

-- The agent of each cluster: the last report that was accepted.
CREATE TABLE reports (
    cluster_id TEXT PRIMARY KEY NOT NULL REFERENCES clusters (id),
    -- UID of the kube-system namespace; bound at the first report.
    cluster_uid TEXT NOT NULL,
    identity TEXT NOT NULL,
    epoch BIGINT NOT NULL,
    sequence BIGINT NOT NULL,
    -- Of any kind.
    reported_at BIGINT NOT NULL,
    -- Of each kind, NULL before the first: when, and the digest of the whole snapshot.
    pods_at BIGINT,
    pods_digest TEXT,
    deployments_at BIGINT,
    deployments_digest TEXT,
    flux_at BIGINT,
    flux_digest TEXT
);

-- One object as last reported. A row vanishes with its object.
CREATE TABLE statuses (
    cluster_id TEXT NOT NULL REFERENCES clusters (id),
    snapshot TEXT NOT NULL,
    kind TEXT NOT NULL,
    namespace TEXT NOT NULL,
    name TEXT NOT NULL,
    deployment_id TEXT REFERENCES deployments (id),
    uid TEXT NOT NULL,
    deleting BOOLEAN NOT NULL,
    digest TEXT NOT NULL,
    -- JSON, never looked into by SQL.
    content TEXT NOT NULL,
    -- When the content last changed.
    updated_at BIGINT NOT NULL,
    PRIMARY KEY (snapshot, cluster_id, kind, namespace, name)
);
CREATE INDEX statuses_deployment ON statuses (deployment_id, snapshot);
-- Every answer to a report asks for these.
CREATE INDEX statuses_deleting ON statuses (cluster_id, deployment_id, uid) WHERE deleting;

-- The newest commit of ours in each repository and branch.
CREATE TABLE revisions (
    repository TEXT NOT NULL,
    branch TEXT NOT NULL,
    revision TEXT NOT NULL,
    -- When the commit was made.
    created_at BIGINT NOT NULL,
    PRIMARY KEY (repository, branch)
);

-- Every report asks for them.
CREATE INDEX tasks_running ON tasks (deployment_id, state) WHERE state = 'running';
