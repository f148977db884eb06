-- Changes that people review before they count.
CREATE TABLE proposals (
    id TEXT PRIMARY KEY NOT NULL,
    cluster_id TEXT NOT NULL REFERENCES clusters (id),
    repository TEXT NOT NULL,
    branch TEXT NOT NULL,
    head_branch TEXT NOT NULL,
    title TEXT NOT NULL,
    -- Whose configuration it changes; NULL: it is about one deployment.
    level TEXT,
    subject_id TEXT,
    patches JSON NOT NULL,
    fan_out_id TEXT,
    delivery JSON NOT NULL,
    state TEXT NOT NULL,
    -- The newest commit of its branch that is known with all it holds.
    head TEXT,
    number BIGINT,
    url TEXT,
    message TEXT,
    described TEXT,
    comment_id BIGINT NOT NULL,
    told BOOLEAN NOT NULL,
    version BIGINT NOT NULL,
    author_name TEXT NOT NULL,
    author_email TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    ended_at BIGINT
);
CREATE INDEX proposals_cluster ON proposals (cluster_id, id);
CREATE INDEX proposals_attended ON proposals (id) WHERE state = 'open' OR NOT told;
-- One open one for each configuration.
CREATE UNIQUE INDEX proposals_subject ON proposals (level, subject_id) WHERE state IN ('preparing', 'open') AND subject_id IS NOT NULL;

CREATE TABLE proposal_items (
    proposal_id TEXT NOT NULL REFERENCES proposals (id),
    deployment_id TEXT NOT NULL REFERENCES deployments (id),
    edits JSON NOT NULL,
    instance_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    base_instance_id TEXT,
    pushed_instance_id TEXT,
    state TEXT NOT NULL,
    -- Whether it is a proposal of the deployment's own.
    own BOOLEAN NOT NULL,
    PRIMARY KEY (proposal_id, deployment_id)
);
CREATE UNIQUE INDEX proposal_items_own ON proposal_items (deployment_id) WHERE state = 'open' AND own;
CREATE INDEX proposal_items_deployment ON proposal_items (deployment_id, proposal_id);
CREATE INDEX proposal_items_instance ON proposal_items (instance_id);
CREATE INDEX proposal_items_task ON proposal_items (task_id);

-- What each push to a proposal's branch brought: any of them may be what somebody merges.
CREATE TABLE proposal_pushes (
    instance_id TEXT PRIMARY KEY NOT NULL,
    proposal_id TEXT NOT NULL REFERENCES proposals (id),
    deployment_id TEXT NOT NULL REFERENCES deployments (id),
    -- How many of the item's edits and of the proposal's patches it has.
    edits BIGINT NOT NULL,
    patches BIGINT NOT NULL
);
CREATE INDEX proposal_pushes_item ON proposal_pushes (proposal_id, deployment_id);

-- What the forge shall know of each commit of ours and of each merge.
CREATE TABLE commit_statuses (
    commit_id TEXT NOT NULL,
    deployment_id TEXT NOT NULL REFERENCES deployments (id),
    task_id TEXT NOT NULL,
    cluster_id TEXT NOT NULL REFERENCES clusters (id),
    -- What it was told last; NULL: nothing.
    told TEXT,
    attempts BIGINT NOT NULL,
    is_final BOOLEAN NOT NULL,
    PRIMARY KEY (commit_id, deployment_id)
);
CREATE INDEX commit_statuses_due ON commit_statuses (cluster_id) WHERE NOT is_final;

-- How changes come to the branch that Flux follows.
ALTER TABLE clusters ADD COLUMN delivery JSON NOT NULL DEFAULT '{}';
ALTER TABLE environments ADD COLUMN delivery JSON NOT NULL DEFAULT '{}';
-- The forge of the repository, and what opens it, sealed.
ALTER TABLE clusters ADD COLUMN forge JSON;
ALTER TABLE clusters ADD COLUMN forge_secrets BYTEA;
-- A fan-out that finds the deployments of a proposal.
ALTER TABLE fan_outs ADD COLUMN proposal_id TEXT;
