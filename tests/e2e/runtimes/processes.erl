%% Thousands of processes with heaps of their own, messages between them, binaries that they share,
%% and programs started meanwhile.
-module(processes).
-export([main/1]).

main([Count]) ->
    Number = list_to_integer(Count),
    Shared = << <<(X * 7919):32>> || X <- lists:seq(1, 200000) >>,
    Self = self(),
    Pids = [spawn_link(fun() -> work(Self, N, Shared) end) || N <- lists:seq(1, Number)],
    [Pid ! {turn, T} || T <- lists:seq(1, 3), Pid <- Pids],
    Said = [os:cmd("echo child " ++ integer_to_list(N)) || N <- lists:seq(1, 5)],
    Sums = [receive {Pid, Sum} -> Sum end || Pid <- Pids],
    io:format("~p ~p ~p~n", [lists:sum(Sums), erlang:phash2(Sums), erlang:phash2(Said)]).

work(Parent, N, Shared) ->
    Data = maps:from_list([{{N, I}, lists:seq(I, I + 20)} || I <- lists:seq(1, 60)]),
    Sum = lists:foldl(
        fun(T, Sum) ->
            receive {turn, T} -> ok end,
            <<_:N/binary, Byte, _/binary>> = Shared,
            Sum + Byte + maps:fold(fun({_, I}, L, S) -> S + I * T + lists:sum(L) end, 0, Data)
        end, 0, lists:seq(1, 3)),
    Parent ! {self(), Sum}.
