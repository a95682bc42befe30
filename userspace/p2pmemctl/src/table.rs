// SPDX-License-Identifier: MIT OR Apache-2.0

//! Plain aligned tables without lines, for people and for tools such as `awk`.

use comfy_table::{presets, CellAlignment, ContentArrangement, Table};

/// A column: its header, and whether its cells are numbers.
pub(crate) struct Column(pub(crate) String, pub(crate) bool);

/// Returns a column of text.
pub(crate) fn text(header: &str) -> Column {
    Column(header.to_owned(), false)
}

/// Returns a column of right-aligned numbers.
pub(crate) fn number(header: &str) -> Column {
    Column(header.to_owned(), true)
}

/// Returns the cell of a value that may be missing.
pub(crate) fn dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".into(), |value| value.to_string())
}

/// Renders headers and rows. Each line ends with a newline and has no trailing blanks.
pub(crate) fn render(columns: &[Column], rows: &[Vec<String>]) -> String {
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(columns.iter().map(|c| c.0.as_str()));
    table.add_rows(rows);
    for (column, Column(_, is_number)) in table.column_iter_mut().zip(columns) {
        column.set_padding((0, 2));
        if *is_number {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let lines: Vec<String> = table.lines().map(|l| l.trim_end().to_owned() + "\n").collect();
    lines.concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let rows = [
            vec!["1".into(), "a".into(), "10 MiB".into()],
            vec!["12".into(), "bcd".into(), "".into()],
        ];
        let table = render(&[number("ID"), text("NAME"), number("SIZE")], &rows);
        assert_eq!(table, "ID  NAME    SIZE\n 1  a     10 MiB\n12  bcd\n");
    }
}
