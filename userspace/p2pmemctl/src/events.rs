// SPDX-License-Identifier: MIT OR Apache-2.0

//! `events`: prints events as they arrive.

use std::time::Instant;

use crate::cli::EventsArgs;
use crate::{Context, Outcome};

pub(crate) fn events(context: &mut Context<'_>, args: &EventsArgs) -> anyhow::Result<Outcome> {
    let mut events = context.open()?.events();
    let deadline = args.timeout.map(|t| Instant::now() + t);
    let mut left = args.count.unwrap_or(u64::MAX);
    while left > 0 {
        let wait = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        let Some(event) = events.next_within(wait)? else { break };
        if context.json {
            // One object per line, so that a reader can process the stream.
            writeln!(context.out, "{}", serde_json::to_string(&event)?)?;
        } else {
            let seconds = std::time::Duration::from_nanos(event.time_ns).as_secs_f64();
            writeln!(context.out, "[{seconds:14.6}] {event}")?;
        }
        context.out.flush()?;
        left -= 1;
    }
    Ok(Outcome::Done)
}
