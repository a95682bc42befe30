// SPDX-License-Identifier: MIT OR Apache-2.0

//! The log of a process, on standard error.

use anyhow::{Context, Result};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Logs to standard error what the environment variable `RUST_LOG` selects, and errors if the variable is not set.
///
/// # Errors
///
/// `RUST_LOG` is not a list of levels, such as `info` or `p2pmem_mlx5=debug,p2pmem_accel=debug`.
pub fn start() -> Result<()> {
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let filter = filter(std::env::var("RUST_LOG").ok().as_deref())?;
    tracing_subscriber::registry().with(layer).with(filter).init();
    Ok(())
}

/// Returns the filter for a value of `RUST_LOG`.
fn filter(text: Option<&str>) -> Result<Targets> {
    match text.filter(|text| !text.is_empty()) {
        None => Ok(Targets::new().with_default(LevelFilter::ERROR)),
        Some(text) => text
            .parse()
            .with_context(|| format!("RUST_LOG={text}: use levels such as info, or p2pmem_mlx5=debug")),
    }
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::filter;

    #[test]
    fn invalid_levels_are_errors() {
        for text in ["p2pmem_mlx5=loud", "a=b=c"] {
            let error = filter(Some(text)).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn errors_are_logged_by_default() {
        for text in [None, Some("")] {
            let filter = filter(text).unwrap();
            assert!(filter.would_enable("p2pmem_mlx5", &Level::ERROR));
            assert!(!filter.would_enable("p2pmem_mlx5", &Level::WARN));
        }
    }

    #[test]
    fn levels_are_selected_by_crate() {
        let filter = filter(Some("info,p2pmem_mlx5=debug")).unwrap();
        assert!(filter.would_enable("p2pmem_mlx5::send", &Level::DEBUG));
        assert!(filter.would_enable("p2pmem_accel", &Level::INFO));
        assert!(!filter.would_enable("p2pmem_accel", &Level::DEBUG));
    }
}
