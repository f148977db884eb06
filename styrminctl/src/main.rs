//! The program `styrminctl`.

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    styrminctl::run().await
}
