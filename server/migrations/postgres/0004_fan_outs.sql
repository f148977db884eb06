-- A changed configuration on its way to every deployment that takes values from it.
CREATE TABLE fan_outs (
    id TEXT PRIMARY KEY NOT NULL,
    level TEXT NOT NULL,
    subject_id TEXT NOT NULL,
    cluster_id TEXT NOT NULL REFERENCES clusters (id),
    state TEXT NOT NULL,
    -- Deployments that it left as they are, and why. JSON.
    untouched JSON NOT NULL,
    author_name TEXT NOT NULL,
    author_email TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    ended_at BIGINT
);
CREATE INDEX fan_outs_subject ON fan_outs (subject_id, id);
CREATE INDEX fan_outs_running ON fan_outs (id) WHERE state = 'running';

ALTER TABLE tasks ADD COLUMN fan_out_id TEXT;
CREATE INDEX tasks_fan_out ON tasks (fan_out_id, id) WHERE fan_out_id IS NOT NULL;

-- Rows of a fan-out wait until it has ended, so that they are one commit.
ALTER TABLE outbox ADD COLUMN fan_out_id TEXT;

-- What an instance asks for, to compare many without reading them. NULL: made by an earlier release.
ALTER TABLE instances ADD COLUMN content_digest TEXT;
