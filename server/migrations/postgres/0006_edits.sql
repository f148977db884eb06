-- What people changed in a cluster's repository, and what became of it.
CREATE TABLE edits (
    id TEXT PRIMARY KEY NOT NULL,
    cluster_id TEXT NOT NULL REFERENCES clusters (id),
    -- NULL: it is about a file that is no deployment's.
    deployment_id TEXT REFERENCES deployments (id),
    path TEXT NOT NULL,
    kind TEXT NOT NULL,
    state TEXT NOT NULL,
    -- The commit that made it, and its author.
    commit_id TEXT NOT NULL,
    author_name TEXT NOT NULL,
    author_email TEXT NOT NULL,
    -- From which commit to which the branch was read when it was found.
    reading TEXT NOT NULL,
    -- What the file holds since; NULL: it is gone, or no text.
    content TEXT,
    message TEXT,
    -- The task that took it over.
    task_id TEXT,
    created_at BIGINT NOT NULL,
    decided_at BIGINT
);
CREATE UNIQUE INDEX edits_reading ON edits (cluster_id, reading, path);
CREATE INDEX edits_path ON edits (cluster_id, path, id);
CREATE INDEX edits_deployment ON edits (deployment_id, id);
CREATE INDEX edits_open ON edits (cluster_id, state) WHERE state IN ('held', 'waiting', 'restoring');
CREATE INDEX edits_created ON edits (created_at);

-- How far the commits of each branch were read.
CREATE TABLE heads (
    repository TEXT NOT NULL,
    branch TEXT NOT NULL,
    commit_id TEXT NOT NULL,
    -- Counts the readings.
    reads BIGINT NOT NULL,
    PRIMARY KEY (repository, branch)
);
INSERT INTO heads (repository, branch, commit_id, reads) SELECT repository, branch, revision, 0 FROM revisions;

-- What the server does about people's edits.
ALTER TABLE clusters ADD COLUMN edit_policy TEXT NOT NULL DEFAULT 'adopt';
-- How many removals at once are taken over without asking.
ALTER TABLE clusters ADD COLUMN removal_threshold BIGINT NOT NULL DEFAULT 0;

-- A held edit keeps the changes of its deployment back until somebody decides.
ALTER TABLE outbox ADD COLUMN edit_id TEXT;

-- Public keys of others whose commits Flux accepts beside ours, as a list; NULL: it accepts every commit.
ALTER TABLE clusters ADD COLUMN trusted_keys JSON;

-- The process that writes to the repositories: one row. `until` in milliseconds of the database's clock.
CREATE TABLE leads (
    id INTEGER PRIMARY KEY NOT NULL,
    holder TEXT NOT NULL,
    -- Unique, so that a lead that is only kept does not wait for who checks it, and one that goes to another does.
    epoch BIGINT NOT NULL UNIQUE,
    until BIGINT NOT NULL
);

-- Secrets are encrypted for several recipients, while a key is replaced.
ALTER TABLE clusters ADD COLUMN age_recipients JSON NOT NULL DEFAULT '[]';
UPDATE clusters SET age_recipients = json_build_array(age_recipient) WHERE age_recipient IS NOT NULL;
ALTER TABLE clusters DROP COLUMN age_recipient;

-- What each cluster can decrypt, as its agent says.
CREATE TABLE cluster_keys (
    cluster_id TEXT PRIMARY KEY NOT NULL REFERENCES clusters (id),
    recipients JSON NOT NULL,
    reported_at BIGINT NOT NULL
);
