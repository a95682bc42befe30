// SPDX-License-Identifier: MIT OR Apache-2.0

//! Progress bars of long measurements.

use std::io::IsTerminal;

use indicatif::style::TemplateError;
use indicatif::{ProgressBar, ProgressStyle};

/// Returns a bar of `length` units; hidden with JSON, or if standard error is no terminal.
pub fn bar(unit: &str, length: u64, json: bool) -> ProgressBar {
    if json || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    // A unit is a plain word; the default bar is the fallback if the template is invalid.
    let style = style(unit).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(length).with_style(style)
}

fn style(unit: &str) -> Result<ProgressStyle, TemplateError> {
    let style = ProgressStyle::with_template(&format!("{{msg}} [{{bar:40}}] {{pos}}/{{len}} {unit}"))?;
    Ok(style.progress_chars("=> "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_for_terminals() {
        assert!(style("messages").is_ok());
        assert!(bar("messages", 1, true).is_hidden());
    }
}
