//! What an agent says, without an agent: for tests of the server's half.

use crate::server::Server;
use serde_json::{Value, json};
use styrmin_client::{Client, ClientError};

/// An agent, as far as the server can tell.
pub struct Agent {
    /// With the cluster's token.
    pub client: Client,
    /// Of the process.
    pub identity: String,
    /// Of the lease.
    pub epoch: i64,
    /// Of the last report.
    pub sequence: i64,
    /// Of the cluster.
    pub uid: String,
}

impl Agent {
    /// One that has not reported yet.
    #[must_use]
    pub fn new(server: &Server, token: &str, identity: &str, epoch: i64) -> Self {
        let client = Client::new(&server.address(), token).unwrap();
        Self { client, identity: identity.into(), epoch, sequence: 0, uid: "uid-1".into() }
    }

    /// Sends a whole snapshot: pods, deployments or flux.
    ///
    /// # Errors
    /// When the server refuses it.
    pub async fn report(&mut self, kind: &str, items: Value) -> Result<Value, ClientError> {
        self.sequence += 1;
        let (name, argument, input) = match kind {
            "pods" => ("reportPodStatuses", "pods", "PodStatusInput"),
            "deployments" => ("reportDeploymentStatuses", "deployments", "DeploymentStatusInput"),
            _ => ("reportFluxStatuses", "statuses", "FluxStatusInput"),
        };
        let query = format!(
            "mutation($agent: AgentInput!, $items: [{input}!]!) {{ {name}(agent: $agent, {argument}: $items) {{ newestRevision confirmedDeletions {{ deploymentId uid }} }} }}"
        );
        let agent = json!({ "identity": self.identity, "epoch": self.epoch, "sequence": self.sequence, "clusterUid": self.uid });
        Ok(self.client.execute(&query, json!({ "agent": agent, "items": items })).await?[name].clone())
    }

    /// Sends a whole snapshot of StyrminDeployments.
    pub async fn deployments(&mut self, items: &[Value]) -> Value {
        self.report("deployments", json!(items)).await.unwrap()
    }
}
